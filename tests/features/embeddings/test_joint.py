"""Losses over the rows of a global batch: the same as in one pass of a plain loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, BertConfig

from tests.helpers.families import CONFIGS
from tests.helpers.ranks import RankPools
from tests.helpers.training import (
    TINY_BERT,
    TINY_TASKS,
    TinyTask,
    sgd_sections,
    tiny_recipe,
    tiny_training,
    tiny_tuples,
    train_tiny,
    weights_of,
)
from tests.parity.cases import assert_same_curve
from trainer.data.collate import Padding
from trainer.engine import joint
from trainer.recipe.schema import Recipe

MODEL = {"config": {**TINY_BERT, "initializer_range": 0.2}, "tokenizer": "none"}
SCORED = {"texts": ["a", "b"], "score": "score", "metrics": ["spearman"]}


def recipe_of(task: dict[str, Any] | None = None, dropout: float = 0.0, **training: Any) -> Recipe:
    return tiny_recipe(
        task={"type": "embedding", **(task or {})},
        model={**MODEL, "dropout": dropout},
        **sgd_sections(0.1),
        training={"max_steps": 5, "max_grad_norm": None, **training},
    )


def pairs_with_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    def split(num_rows: int) -> Any:
        return tiny_tuples(num_rows, texts_per_row=2, has_scores=True)

    monkeypatch.setitem(TINY_TASKS, "embedding", TinyTask(TINY_TASKS["embedding"].keys, MODEL, split, Padding(0)))


def test_a_plain_loop_with_the_whole_batch_in_one_pass():
    recipe = recipe_of(micro_batch_size=5)
    losses, expected = [], []
    with tiny_training(recipe) as training:
        model = AutoModel.from_config(BertConfig(**{k: v for k, v in MODEL["config"].items() if k != "model_type"}))
        model.load_state_dict(weights_of(training.engine, training.mesh))
        model.eval()  # no dropout
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        pad = torch.nn.functional.pad
        for batch in training.loader:
            longest = max(m.inputs["input_ids"].shape[-1] for m in batch.microbatches)
            inputs = {
                name: torch.cat(
                    [pad(m.inputs[name], (0, longest - m.inputs[name].shape[-1])) for m in batch.microbatches]
                )
                for name in ("input_ids", "attention_mask")
            }
            mask = inputs["attention_mask"]
            flat = {name: tensor.reshape(-1, longest) for name, tensor in inputs.items()}
            states = model(**flat).last_hidden_state.view(*mask.shape, -1)
            pooled = (states * mask[..., None]).sum(2) / mask.sum(2)[..., None]
            anchors, *others = torch.nn.functional.normalize(pooled, dim=-1).unbind(1)
            logits = anchors @ torch.cat(others).T / 0.05
            loss = torch.nn.functional.cross_entropy(logits, torch.arange(len(logits)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            expected.append(loss.item())
            losses.append(training.engine.train_step(batch).loss)
    assert losses == pytest.approx(expected, abs=1e-5)
    assert len(losses) == 5


@pytest.mark.parametrize("loss", ["cosent", "cosine"])
def test_scores_under_accumulation(monkeypatch, loss):
    pairs_with_scores(monkeypatch)
    task = {**SCORED, "loss": loss}
    whole = train_tiny(recipe_of(task, dropout=0.1))
    assert_same_curve(train_tiny(recipe_of(task, dropout=0.1, micro_batch_size=5)), whole)


def duplicates_over_ranks(parallel: dict[str, Any], size: int) -> Any:
    """Return the curve of rows with five different anchors and seven different positives."""

    def split(num_rows: int) -> Any:
        found, rows = tiny_tuples(num_rows, texts_per_row=2), np.arange(num_rows)
        found.arrays["labels"] = np.stack([rows % 5, 100 + rows % 7], 1)
        return found

    keys = {**TINY_TASKS["embedding"].keys, "texts": ["a", "b"], "mask_duplicates": True}
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(TINY_TASKS, "embedding", TinyTask(keys, MODEL, split, Padding(0)))
        training = {"max_steps": 3, "micro_batch_size": size}
        return train_tiny(tiny_recipe(task=keys, model={**MODEL, "dropout": 0.1}, training=training, parallel=parallel))


def test_duplicates_of_other_microbatches_and_ranks_are_masked(ranks: RankPools):
    expected = duplicates_over_ranks({}, 12)
    assert_same_curve(duplicates_over_ranks({}, 5), expected)
    for curve in ranks(2).run(duplicates_over_ranks, {"strategy": "fsdp"}, 4):
        assert_same_curve(curve, expected)


def cosent_over_ranks(strategy: str) -> Any:
    with pytest.MonkeyPatch.context() as monkeypatch:
        pairs_with_scores(monkeypatch)
        return train_tiny(
            tiny_recipe(
                task={"type": "embedding", **SCORED, "loss": "cosent"},
                model={**MODEL, "dropout": 0.1},
                training={"max_steps": 5, "micro_batch_size": 12 if strategy == "none" else 4},
                parallel={"strategy": "ddp" if strategy == "none" else strategy},
            )
        )


def test_scores_of_all_ranks_are_ordered(ranks: RankPools):
    expected = cosent_over_ranks("none")
    for curve in ranks(2).run(cosent_over_ranks, "zero2"):
        assert_same_curve(curve, expected)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{}, {"tensor": 2, "sequence": True, "offload": "parameters"}])
def test_selective_recomputations_of_zero3_may_gather_other_weights(ranks: RankPools, parallel):
    """The first pass, without gradients, changes the order in which DeepSpeed gathers weights."""

    def recipe(size: int, parallel: dict[str, Any], how: str) -> Recipe:
        training = {"max_steps": 3, "micro_batch_size": size}
        task, model = TINY_TASKS["embedding"].keys, {**MODEL, "dropout": 0.1}
        return tiny_recipe(task=task, model=model, training=training, parallel=parallel, activation_checkpointing=how)

    expected = train_tiny(recipe(12, {}, "none"))
    for curve in ranks(2).run(train_tiny, recipe(3, {"strategy": "zero3", **parallel}, "selective")):
        assert_same_curve(curve, expected)


def test_the_loss_scale_of_fp16_multiplies_the_cached_gradient():
    def first_step(precision: str) -> Any:
        recipe = recipe_of(micro_batch_size=5).model_copy(update={"precision": precision})
        with tiny_training(recipe) as training:
            return training.steps(1)[0]

    half, single = first_step("fp16"), first_step("fp32")
    assert half.loss_scale == 2**16
    assert half.loss == pytest.approx(single.loss, rel=5e-3)
    assert half.grad_norm == pytest.approx(single.grad_norm, rel=5e-2)


def test_a_decoder_with_the_last_token(monkeypatch):
    model = {"config": {"model_type": "qwen3", **CONFIGS["qwen3"], "initializer_range": 0.2}, "tokenizer": "none"}
    monkeypatch.setitem(TINY_TASKS, "embedding", TinyTask(TINY_TASKS["embedding"].keys, model, tiny_tuples, Padding(0)))

    def train(size: int) -> Any:
        task = {"type": "embedding", "pooling": "last"}
        return train_tiny(tiny_recipe(task=task, training={"max_steps": 3, "micro_batch_size": size}))

    assert_same_curve(train(4), train(12))


@pytest.mark.parametrize("layout_invariant", [True, False])
def test_both_passes_drop_the_same_elements(monkeypatch, layout_invariant):
    first: list[torch.Tensor] = []
    second: list[torch.Tensor] = []
    real = joint.joint_losses

    def record(task: Any, mesh: Any, num_rows: int, microbatches: Any, scores: Any) -> Any:
        first.extend(scores)
        return real(task, mesh, num_rows, microbatches, scores)

    class Recorded(joint.JointLosses):
        def sum_of(self, rows: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            second.append(scores.detach())
            return super().sum_of(rows, scores)

    monkeypatch.setattr(joint, "joint_losses", record)
    monkeypatch.setattr(joint, "JointLosses", Recorded)
    recipe = recipe_of(dropout=0.3, micro_batch_size=4, layout_invariant_dropout=layout_invariant)
    with tiny_training(recipe) as training:
        training.steps(2)
    assert len(first) == len(second) == 6
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert not torch.equal(first[0], first[3])


def test_the_unused_pooler_stays_and_a_step_of_one_row_has_no_loss():
    with tiny_training(recipe_of(), num_rows=13) as training:
        before = weights_of(training.engine, training.mesh)
        losses = [result.loss for result in training.steps(2)]
        after = weights_of(training.engine, training.mesh)
    same = {name for name, weight in after.items() if torch.equal(weight, before[name])}
    assert same == {"pooler.dense.weight", "pooler.dense.bias"}
    assert losses[1] > 0  # two hard negatives of the one row
