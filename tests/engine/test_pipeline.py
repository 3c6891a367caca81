"""Trainings through pipeline stages, beyond the parity matrix: going on, exporting, failing, and keeping busy."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from transformers.masking_utils import sdpa_mask

from tests.engine.test_tensor import export
from tests.helpers.ranks import RankError, RankPools
from tests.helpers.training import TINY_BERT, VOCABULARY, tiny_recipe, tiny_training, train_tiny
from tests.parity.test_export import exported
from tests.parity.test_resuming import all_steps, first_steps, last_steps, tail
from trainer.data.collate import Padding
from trainer.engine.pipelined import passes_of
from trainer.engine.results import StepResult
from trainer.models import attention
from trainer.models.describe import ModelUse, describe
from trainer.models.fill import build_model
from trainer.models.place import ModelCut, StageChoice
from trainer.parallel.microbatch import Microbatch, RankBatch
from trainer.recipe.schema import Recipe
from trainer.tasks.registry import build_task

FOUR_LAYERS = {**TINY_BERT, "num_hidden_layers": 4}


def pipeline(stages: int, **keys: Any) -> dict[str, Any]:
    return {"pipeline": {"stages": stages, **keys}}


class TestPasses:
    def microbatch(self, rows: int, filler: bool = False) -> Microbatch:
        ids = torch.arange(rows * 3).view(rows, 3)
        return Microbatch({"input_ids": ids}, torch.arange(rows), torch.arange(rows) + 100, filler)

    def test_repeat_the_last_row_where_rows_are_few(self):
        (one,) = passes_of([self.microbatch(3), self.microbatch(2)], 1, 4)
        assert one.rows_of_each == 2
        assert one.num_rows == 5
        assert one.rows.tolist() == [100, 101, 102, 100, 101, 101, 101, 101]
        assert [one.real_rows(index) for index in range(4)] == [slice(0, 2), slice(2, 4), slice(4, 5), slice(5, 5)]

    def test_share_the_rows_of_a_step(self):
        first, second = passes_of([self.microbatch(7)], 2, 2)
        assert (first.num_rows, second.num_rows) == (4, 3)
        assert second.labels.tolist() == [4, 5, 6, 6]

    def test_of_a_rank_without_rows(self):
        (one,) = passes_of([self.microbatch(1, filler=True)], 1, 2)
        assert (one.num_rows, one.rows_of_each) == (0, 1)


@pytest.mark.slow
def test_the_same_stages_go_on_bit_for_bit(ranks: RankPools, tmp_path):
    recipe = tiny_recipe(
        model={"config": FOUR_LAYERS, "dropout": 0.1}, parallel=pipeline(2, schedule="interleaved_1f1b")
    )
    whole = ranks(2).run(all_steps, recipe)[0]
    ranks(2).run(first_steps, recipe, tmp_path)
    curve = ranks(2).run(last_steps, recipe, tmp_path)[0]
    assert curve.losses == tail(whole).losses
    assert curve.grad_norms == tail(whole).grad_norms
    assert all(torch.equal(curve.weights[name], weight) for name, weight in whole.weights.items())


@pytest.mark.parametrize(
    ("num_ranks", "parallel"),
    [
        (2, pipeline(2)),
        pytest.param(4, {"strategy": "fsdp", **pipeline(2)}, marks=pytest.mark.slow),
        pytest.param(4, {"tensor": 2, **pipeline(2)}, marks=pytest.mark.slow),
    ],
)
def test_untrained_weights_are_exported_bit_for_bit(ranks: RankPools, tmp_path, num_ranks, parallel):
    ranks(num_ranks).run(export, tiny_recipe(parallel=parallel), tmp_path / "parts")
    export(tiny_recipe(), tmp_path / "whole")
    parts, whole = exported(tmp_path / "parts"), exported(tmp_path / "whole")
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], weight) for name, weight in whole.items())


def test_a_tied_weight_is_exported_once(ranks: RankPools, tmp_path):
    from safetensors import safe_open

    keys: dict[str, Any] = {"task": {"type": "masked_lm"}, "model": {"config": FOUR_LAYERS}}
    ranks(2).run(export, tiny_recipe(**keys, parallel=pipeline(2)), tmp_path / "parts")
    export(tiny_recipe(**keys), tmp_path / "whole")
    names = []
    for folder in ("parts", "whole"):
        with safe_open(tmp_path / folder / "model.safetensors", framework="pt") as file:
            names.append(set(file.keys()))
    assert names[0] == names[1]


def test_a_rank_reads_and_draws_its_own_stage_only(tmp_path):
    recipe = tiny_recipe(model={"config": FOUR_LAYERS})
    task = build_task(recipe.task)
    options = {"num_labels": 3}
    whole = build_model(describe(recipe.model, recipe.training, ModelUse(task.auto_class_name, options))).model
    whole.save_pretrained(tmp_path)  # type: ignore[operator]
    pretrained = recipe.model.model_copy(update={"config": None, "name_or_path": str(tmp_path)})
    sizes = []
    for model in (recipe.model, pretrained):
        for stage in (0, 1):
            cut = ModelCut(choice=StageChoice(stage, 2))
            built = build_model(describe(model, recipe.training, ModelUse(task.auto_class_name, options)), cut)
            assert not any("every rank held the whole model" in note for note in built.notes)
            for name, parameter in built.model.named_parameters():
                assert torch.equal(parameter, whole.get_parameter(name))
            sizes.append(sum(parameter.numel() for parameter in built.model.parameters()))
    assert sizes[0] + sizes[1] == sum(parameter.numel() for parameter in whole.parameters())
    assert sizes[:2] == sizes[2:]


def overflow_on_rank(rank: int, recipe: Recipe) -> tuple[float | None, int | None, list[float]]:
    """A weight of one rank becomes so large that fp16 overflows there, for one step."""
    with tiny_training(recipe) as training:
        parameter = next(p for name, p in training.model.named_parameters() if name.endswith("output.dense.weight"))
        before = parameter.detach().clone()
        if dist.get_rank() == rank:
            with torch.no_grad():
                parameter.mul_(1e6)
        (result,) = training.steps(1)
        with torch.no_grad():
            parameter.copy_(before)
        return result.loss_scale, result.skipped_steps, [float(p.sum()) for p in training.model.parameters()]


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_an_overflow_in_one_stage_is_skipped_by_all(ranks: RankPools, rank):
    recipe = tiny_recipe(parallel=pipeline(2), precision="fp16", model={"config": FOUR_LAYERS})
    with tiny_training(tiny_recipe(model={"config": FOUR_LAYERS})) as training:
        untouched = {name: float(p.sum()) for name, p in training.model.named_parameters()}
    outcomes = ranks(2).run(overflow_on_rank, rank, recipe)
    assert [(scale, skipped) for scale, skipped, _ in outcomes] == [(2.0**16, 1)] * 2
    assert sorted(value for _, _, sums in outcomes for value in sums) == sorted(untouched.values())


def test_a_loss_that_is_not_finite_is_seen_by_every_rank(ranks: RankPools):
    recipe = tiny_recipe(parallel=pipeline(2), **{"optimizer": {"name": "sgd", "learning_rate": 1e30}})
    for results in ranks(2).run(steps_of, recipe):
        assert any(result.is_bad for result in results)


def steps_of(recipe: Recipe) -> list[StepResult]:
    with tiny_training(recipe) as training:
        return training.steps(4)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"config": TINY_BERT}, "asks for 3 stages, but the model has 2 layers"),
        (
            {"config": {"model_type": "opt", "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 3,
                        "num_attention_heads": 2, "ffn_dim": 16, "word_embed_proj_dim": 16}},
            "the family opt cannot be cut between its layers",
        ),
    ],
)  # fmt: skip
def test_a_model_that_stages_cannot_split_is_refused_on_every_rank(ranks: RankPools, model, words):
    with pytest.raises(RankError, match=words):
        ranks(3).run(train_tiny, tiny_recipe(model=model, parallel=pipeline(3)))


def idle_share(recipe: Recipe, seconds: float = 0.0) -> float | None:
    """Return the idle share of this rank; each forward and backward pass of a stage sleeps for some seconds first."""

    def slowed(name: str) -> Any:
        work = getattr(PipelineStage, name)
        return mock.patch.object(
            PipelineStage, name, lambda *args, **keys: (time.sleep(seconds), work(*args, **keys))[1]
        )

    with slowed("forward_one_chunk"), slowed("backward_one_chunk"), tiny_training(recipe) as training:
        training.steps(4)
        return training.engine.idle_share()


@pytest.mark.slow
def test_one_microbatch_leaves_ranks_idle_for_longer(ranks: RankPools):
    """With one microbatch, one stage works at a time. The stages sleep, because load on the machine slows work."""
    naive, pipelined = (
        ranks(2).run(
            idle_share,
            tiny_recipe(model={"config": FOUR_LAYERS}, parallel=pipeline(2, schedule="gpipe", microbatches=count)),
            0.4 / count,
        )
        for count in (1, 8)
    )
    assert all(0.0 <= share <= 1.0 for share in (*naive, *pipelined))
    # of passes of equal length: 1/2 + 1/3 with one microbatch, and 1/9 + 1/17 with eight
    assert sum(naive) > 2 * sum(pipelined)


def test_a_lone_process_never_idles():
    assert idle_share(tiny_recipe()) is None


def predictions(recipe: Recipe) -> list[tuple[float, int, list[int]]]:
    from tests.helpers.training import tiny_split
    from trainer.data.loader import EvalLoader

    with tiny_training(recipe) as training:
        training.steps(1)
        loader = EvalLoader(tiny_split(), 7, training.mesh.index("dp"), training.mesh.size("dp"), Padding(0))
        results = [training.engine.eval_step(microbatch) for microbatch in loader]
        training.steps(1)  # and training goes on
        return [
            (result.loss_sum, result.num_valid, result.predictions.get("predictions", torch.zeros(0)).tolist())
            for result in results
        ]


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("interleaved_1f1b", marks=pytest.mark.slow)])
def test_an_evaluation_gives_what_one_process_gives_on_the_last_stage(ranks: RankPools, schedule):
    keys: dict[str, Any] = {"model": {"config": FOUR_LAYERS}}
    alone = predictions(tiny_recipe(**keys))
    first, last = ranks(2).run(predictions, tiny_recipe(**keys, parallel=pipeline(2, schedule=schedule)))
    assert all(result == (0.0, 0, []) for result in first)
    for (loss, valid, predicted), (its_loss, its_valid, its_predicted) in zip(alone, last, strict=True):
        assert its_loss == pytest.approx(loss, rel=1e-5)
        assert (its_valid, its_predicted) == (valid, predicted)


def masks_of(recipe: Recipe) -> tuple[list[bool], float, float | None]:
    """Return whether the stages of this rank mask each microbatch, and the loss and gradient norm of the step."""
    inputs = {"input_ids": torch.arange(1, 41).reshape(8, 5), "attention_mask": torch.ones(8, 5, dtype=torch.long)}
    inputs["attention_mask"][3, 4:] = 0  # the second of four microbatches
    batch = RankBatch([Microbatch(inputs, torch.arange(8) % 2, torch.arange(8))], 8, 39)
    with tiny_training(recipe) as training, mock.patch.object(attention, "sdpa_mask", wraps=sdpa_mask) as mask:
        result = training.engine.train_step(batch)
        return (
            [call.kwargs["attention_mask"] is not None for call in mask.call_args_list],
            result.loss,
            result.grad_norm,
        )


def test_only_microbatches_with_padding_have_a_mask(ranks: RankPools):
    training = {"global_batch_size": 8, "micro_batch_size": 2}
    found = ranks(2).run(masks_of, tiny_recipe(training=training, parallel=pipeline(2)))
    _, *alone = masks_of(tiny_recipe(training=training))
    for masks, *results in found:
        assert masks == [False, True, False, False]
        assert results == pytest.approx(alone, rel=1e-5)
