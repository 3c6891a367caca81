"""One optimizer step at a time, on one process and on two."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from tests.helpers.ranks import RankPools
from tests.helpers.training import (
    TINY_BERT,
    TINY_DECODERS,
    TINY_TASKS,
    MemorySource,
    TinyTraining,
    build_tiny,
    tiny_recipe,
    tiny_training,
    train_tiny,
    whole_state,
)
from trainer.base.errors import TrainerError, UsageError
from trainer.engine.replicated import LossReplica
from trainer.engine.state import MODEL_PREFIX
from trainer.parallel.dropout import KeyedDropout
from trainer.parallel.microbatch import IGNORED_LABEL, Microbatch, RankBatch
from trainer.recipe.schema import Recipe
from trainer.tasks.task import VocabularyLoss


def tiny(**sections: Any) -> TinyTraining:
    return build_tiny(tiny_recipe(**sections))


def steps(training: TinyTraining, number: int) -> list[Any]:
    return [training.engine.train_step(batch) for batch in islice(training.loader, number)]


def weights(training: TinyTraining) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in training.model.named_parameters()}


def state_of(training: TinyTraining) -> MemorySource:
    return whole_state(training.engine, training.mesh)


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def assert_same_state(one: MemorySource, other: MemorySource) -> None:
    assert one.scalars == other.scalars
    assert_equal(one.tensors, other.tensors)


class TestTrainStep:
    def test_is_plain_pytorch(self):
        """One step of a mean loss, clipped, without dropout, against the shortest correct loop."""
        training = tiny(model={"dropout": 0.0}, training={"micro_batch_size": 5, "max_grad_norm": 0.05})
        batch = next(iter(training.loader))
        plain = copy.deepcopy(training.model)
        for module in plain.modules():
            if isinstance(module, KeyedDropout):
                module.p = 0.0
        logits = [plain(**microbatch.inputs).logits for microbatch in batch.microbatches]
        labels = torch.cat([microbatch.labels for microbatch in batch.microbatches])
        loss = nn.functional.cross_entropy(torch.cat(logits), labels)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        groups = [
            {"params": [p for n, p in plain.named_parameters() if ("bias" in n or "LayerNorm" in n) == is_exempt]}
            for is_exempt in (False, True)
        ]
        groups[0]["weight_decay"], groups[1]["weight_decay"] = 0.01, 0.0
        torch.optim.AdamW(groups, lr=1e-3 / 3).step()

        result = training.engine.train_step(batch)
        assert norm > 0.05, "the gradient is clipped"
        assert result.loss == pytest.approx(loss.item(), rel=1e-6)
        assert result.grad_norm == pytest.approx(norm.item(), rel=1e-5)
        assert result.learning_rate == pytest.approx(1e-3 / 3)
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(training.model.get_parameter(name), parameter, atol=2e-6, rtol=1e-5)

    def test_the_learning_rate_follows_the_schedule(self):
        found = [result.learning_rate for result in steps(tiny(training={"max_steps": 5}, schedule={"warmup": 1}), 5)]
        assert found == pytest.approx([5e-4, 1e-3, 7.5e-4, 5e-4, 2.5e-4])

    def test_leaves_no_gradient_behind(self):
        training = tiny()
        steps(training, 1)
        assert all(parameter.grad is None for parameter in training.model.parameters())

    def test_without_clipping_a_large_norm_stays(self):
        clipped, whole = (
            build_tiny(_sgd(max_grad_norm=max_grad_norm, micro_batch_size=12)) for max_grad_norm in (1e-3, None)
        )
        before = weights(clipped)
        (one,), (other,) = steps(clipped, 1), steps(whole, 1)
        assert one.grad_norm == other.grad_norm > 1e-3, "the norm is that before clipping"
        for name, weight in weights(clipped).items():
            moved, would = before[name] - weight, before[name] - weights(whole)[name]
            torch.testing.assert_close(moved, would * 1e-3 / other.grad_norm, atol=1e-6, rtol=1e-3)

    def test_a_filler_adds_exactly_nothing(self):
        with_filler, without = build_tiny(_sgd()), build_tiny(_sgd())
        batch = next(iter(without.loader))
        filler = replace(batch.microbatches[0], filler=True)
        one = with_filler.engine.train_step(replace(batch, microbatches=[*batch.microbatches, filler]))
        assert one == without.engine.train_step(batch)
        assert_equal(weights(with_filler), weights(without))

    def test_dropout_is_on_and_differs_from_step_to_step(self):
        training = build_tiny(_sgd(learning_rate=1e-30))
        batch = next(iter(training.loader))
        first, second = training.engine.train_step(batch), training.engine.train_step(batch)
        assert first.loss != second.loss, "the weights are the same, the masks are not"

    def test_torchs_own_dropout_depends_on_the_seed_and_the_step_alone(self):
        recipe = tiny_recipe(training={"layout_invariant_dropout": False, "max_steps": 4})
        one = train_tiny(recipe)
        torch.manual_seed(99)
        assert train_tiny(recipe).losses == one.losses

    def test_in_bf16_weights_and_moments_stay_in_fp32(self):
        training = tiny(precision="bf16")
        result = steps(training, 2)[1]
        assert {tensor.dtype for tensor in state_of(training).tensors.values()} == {torch.float32}
        exact = steps(tiny(), 2)[1]
        assert result.loss == pytest.approx(exact.loss, rel=0.01)
        assert result.loss != exact.loss


def _sgd(learning_rate: float = 1.0, **training: Any):
    return tiny_recipe(
        optimizer={"name": "sgd", "learning_rate": learning_rate, "weight_decay": 0.0},
        schedule={"name": "constant", "warmup": 0},
        training=training,
    )


def poison(training: TinyTraining, value: float) -> None:
    """Makes every loss `value`, whatever the weights are."""
    task = training.engine._forward._task
    loss_sum = task.loss_sum
    object.__setattr__(task, "loss_sum", lambda logits, labels: loss_sum(logits, labels) * value)


def cure(training: TinyTraining) -> None:
    object.__delattr__(training.engine._forward._task, "loss_sum")


class TestNonFinite:
    @pytest.mark.parametrize(
        ("value", "optimizer"), [(float("nan"), "adamw"), (float("inf"), "adamw"), (float("nan"), "adamw_8bit")]
    )
    def test_weights_and_moments_are_as_before_the_step(self, value, optimizer):
        wide = {"config": {**TINY_BERT, "hidden_size": 64}}  # matrices of 4,096 elements have moments in 8 bits
        training = tiny(training={"max_steps": 4}, model=wide, optimizer={"name": optimizer})
        first, second, third, _ = training.loader
        training.engine.train_step(first)
        before = state_of(training)
        poison(training, value)
        result = training.engine.train_step(second)
        assert result.is_bad
        assert not math.isfinite(result.loss)
        assert_same_state(state_of(training), before)
        cure(training)
        training.engine.train_step(third)  # no gradient of the failed step is left

    def test_a_gradient_that_overflows_where_the_loss_does_not(self):
        training = tiny()
        training.model.classifier.weight.register_hook(lambda gradient: gradient * float("inf"))
        (result,) = training.steps(1)
        assert result.is_bad
        assert math.isfinite(result.loss)


class TestEvalStep:
    def test_has_no_dropout_and_leaves_nothing_behind(self):
        training = tiny(model={"dropout": 0.5})
        microbatch = next(iter(training.loader)).microbatches[0]
        steps(training, 1)
        before, state = weights(training), torch.get_rng_state()
        one, other = training.engine.eval_step(microbatch), training.engine.eval_step(microbatch)
        assert one.loss_sum == other.loss_sum
        assert all(parameter.grad is None for parameter in training.model.parameters())
        assert_equal(weights(training), before)
        assert torch.equal(state, torch.get_rng_state())

    def test_gives_the_sum_and_the_predictions_of_its_rows(self):
        training = tiny()
        microbatch = next(iter(training.loader)).microbatches[0]
        result = training.engine.eval_step(microbatch)
        with torch.no_grad():
            logits = training.model.eval()(**microbatch.inputs).logits
        expected = nn.functional.cross_entropy(logits, microbatch.labels, reduction="sum")
        assert result.loss_sum == pytest.approx(expected.item(), rel=1e-6)
        assert result.num_valid == len(microbatch.labels) == 12
        assert torch.equal(result.predictions["predictions"], logits.argmax(-1))
        assert torch.equal(result.predictions["labels"], microbatch.labels)

    def test_a_filler_gives_nothing(self):
        training = tiny()
        filler = replace(next(iter(training.loader)).microbatches[0], filler=True)
        result = training.engine.eval_step(filler)
        assert (result.loss_sum, result.num_valid, result.predictions) == (0.0, 0, {})

    def test_training_goes_on_with_dropout(self):
        one, other = tiny(), tiny()
        batches = list(islice(one.loader, 3))
        for batch in batches:
            found = one.engine.train_step(batch)
            one.engine.eval_step(batch.microbatches[0])
            assert found == other.engine.train_step(batch)

    def test_ranks_need_not_run_in_step(self, ranks: RankPools):
        assert ranks(2).run(evaluate_on_one_rank) == [3, 0]


def evaluate_on_one_rank() -> int:
    training = tiny()
    batch = next(iter(training.loader))
    evaluated = 0
    if training.mesh.rank == 0:
        for _ in range(3):
            evaluated += training.engine.eval_step(batch.microbatches[0]).num_valid > 0
    training.engine.train_step(batch)
    return evaluated


OPTIMIZERS = {
    "adamw": {"name": "adamw", "learning_rate": 1e-3},
    "sgd": {"name": "sgd", "learning_rate": 0.1},
    "momentum": {"name": "sgd", "learning_rate": 0.1, "momentum": 0.9},
}


def resumed(optimizer: dict[str, Any], layout_invariant: bool = True) -> bool:
    """Whether 6 steps are 3 steps, saved and loaded into another engine, and 3 more: losses, norms, all the state."""
    recipe = tiny_recipe(optimizer=optimizer, training={"max_steps": 6, "layout_invariant_dropout": layout_invariant})
    whole, first = build_tiny(recipe), build_tiny(recipe)
    expected = steps(whole, 6)[3:]
    done = sum(batch.num_rows for batch in islice(whole.loader, 3))
    steps(first, 3)
    state = state_of(first)
    second = build_tiny(recipe, start_sample=done)
    second.engine.load_state(state, 3)
    assert_same_state(state_of(second), state)
    found = steps(second, 3)
    assert found == expected
    assert_same_state(state_of(second), state_of(whole))
    return True


class TestState:
    @pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
    def test_a_resumed_training_is_the_same_bit_for_bit(self, optimizer):
        assert resumed(optimizer)

    def test_also_with_torchs_own_dropout(self):
        assert resumed(OPTIMIZERS["adamw"], layout_invariant=False)

    def test_and_on_two_ranks(self, ranks: RankPools):
        assert ranks(2).run(resumed, OPTIMIZERS["adamw"]) == [True, True]

    def test_names_equal_the_unsharded_model(self):
        training = tiny()
        steps(training, 1)
        names = {name for name, _ in training.model.named_parameters()}
        state = state_of(training).tensors
        assert {name.removeprefix(MODEL_PREFIX) for name in state if name.startswith(MODEL_PREFIX)} == names
        assert {name for name in state if not name.startswith(MODEL_PREFIX)} == {
            f"optimizer.{name}.{key}" for name in names for key in ("step", "exp_avg", "exp_avg_sq")
        }
        assert set(training.engine.placements) == names

    def test_loaded_state_is_a_copy(self):
        one, other = tiny(), tiny()
        steps(one, 1)
        before = state_of(one)
        other.engine.load_state(before, 1)
        steps(other, 2)
        assert_same_state(state_of(one), before)


def refuse_changed_states(*recipes: Recipe) -> bool:
    """Refuse a state without, with another and with a reshaped tensor of the optimizer, and other numbers."""
    for recipe in recipes:
        with tiny_training(recipe) as training:
            training.steps(1)
            state = whole_state(training.engine, training.mesh)
            load = training.engine.load_state
            of_optimizer = [name for name in state.tensors if name.startswith("optimizer.")]
            assert training.engine.keeps_state() == bool(of_optimizer)
            last = {}  # one parameter for each set of keys
            for name in of_optimizer:
                last.setdefault(name.rpartition(".")[0], []).append(name)
            for names in {tuple(one.rpartition(".")[2] for one in names): names for names in last.values()}.values():
                for name in names:
                    tensor = state.tensors.pop(name)
                    if len(names) > 1:  # without any, a parameter has had no gradient
                        with pytest.raises(
                            ValueError, match=rf"^{re.escape(name)} has the shape None, and must have \("
                        ):
                            load(state, 1)
                    state.tensors[name] = tensor.new_zeros((*tensor.shape, 2))
                    with pytest.raises(ValueError, match=rf"^{re.escape(name)} has the shape \(.*2,?\), and must"):
                        load(state, 1)
                    state.tensors[name] = tensor
                if recipe.parallel.strategy.startswith("zero"):
                    without = replace(state, tensors={one: t for one, t in state.tensors.items() if one not in names})
                    with pytest.raises(UsageError, match=r"but the checkpoint has none for .*, which had no gradient"):
                        load(without, 1)
                state.tensors[f"{name}2"] = tensor
                with pytest.raises(ValueError, match=rf"^{re.escape(name)}2 has the shape .* and must have None"):
                    load(state, 1)
                del state.tensors[f"{name}2"]
            for change in ({"other": 1.0}, dict.fromkeys(list(state.scalars)[:1], float("nan"))):
                if change:
                    with pytest.raises(ValueError, match=r"must have .* as finite numbers, but has {.*(other|nan)"):
                        load(replace(state, scalars=state.scalars | change), 1)
            load(state, 1)
    return True


class TestChangedState:
    def test_is_refused_by_each_optimizer(self):
        of_bf16 = {"precision": "bf16", "weights": "bf16_compensated"}
        names = ("muon", "adafactor", "schedule_free_adamw", "adamw_8bit")
        assert refuse_changed_states(
            *(tiny_recipe(optimizer=optimizer) for optimizer in OPTIMIZERS.values()),
            *(
                tiny_recipe(
                    model={"config": {**TINY_BERT, "hidden_size": 64}} if name == "adamw_8bit" else {},
                    optimizer={"name": name, "learning_rate": 1e-3},
                    schedule={"name": "constant"},
                )
                for name in names
            ),
            tiny_recipe(precision="fp16", training={"ema_decay": 0.9}),
            tiny_recipe(**of_bf16),
        )

    @pytest.mark.slow
    def test_is_refused_by_deepspeed(self, ranks: RankPools):
        recipes = [
            tiny_recipe(
                optimizer={"name": name, "learning_rate": 1e-3},
                schedule={"name": "constant"},
                parallel={"strategy": strategy},
                precision=precision,
            )
            for name, strategy, precision in (
                ("adamw", "zero1", "bf16"),
                ("adamw", "zero3", "fp16"),
                ("sgd", "zero2", "fp32"),
                ("schedule_free_adamw", "zero2", "fp32"),
            )
        ]
        assert ranks(2).run(refuse_changed_states, *recipes) == [True, True]


class TestExport:
    def test_opens_with_transformers_and_gives_the_same_logits(self, tmp_path: Path):
        training = tiny()
        steps(training, 2)
        training.engine.export(tmp_path / "model")
        opened = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
        assert opened.config.id2label == {0: "a", 1: "b", 2: "c"}
        microbatch = next(iter(training.loader)).microbatches[0]
        with torch.no_grad():
            torch.testing.assert_close(
                opened(**microbatch.inputs).logits, training.model.eval()(**microbatch.inputs).logits
            )

    def test_on_two_ranks_one_writes_and_all_wait(self, ranks: RankPools, tmp_path: Path):
        folder = tmp_path / "model"
        found = ranks(2).run(export, folder)
        assert found == ["model.safetensors is there"] * 2

    def test_a_full_disk_is_reported_on_every_rank(self, ranks: RankPools, tmp_path: Path):
        (tmp_path / "file").touch()
        for found in ranks(2).run(export, tmp_path / "file" / "model"):
            assert "the model could not be written to" in found


def export(folder: Path) -> str:
    training = tiny()
    try:
        training.engine.export(folder)
    except TrainerError as error:
        return str(error)
    return "model.safetensors is there" if (folder / "model.safetensors").exists() else "nothing"


class TestUnusedParameters:
    def test_are_refused_on_two_ranks_before_they_leave_gradients_unsummed(self, ranks: RankPools):
        for found in ranks(2).run(train_with_an_unused_parameter):
            assert "every parameter to take part in the loss, but of this model unused.weight, unused.bias" in found

    def test_are_harmless_on_one_rank(self):
        assert train_with_an_unused_parameter() == "no error"


def train_with_an_unused_parameter() -> str:
    from trainer.training import assembly as helper

    build_model = helper.build_model

    def with_unused(*args: Any) -> Any:
        built = build_model(*args)
        built.model.unused = nn.Linear(2, 2)
        return built

    helper.build_model = with_unused
    try:
        steps(tiny(), 1)
    except UsageError as error:
        return str(error)
    finally:
        helper.build_model = build_model
    return "no error"


class TokenTask(VocabularyLoss):
    """Labels that can be ignored (-100), as token tasks have: each row's class, unless it is ignored."""

    rows_are_labels = False

    def num_valid(self, labels: Tensor) -> Tensor:
        return (labels != -100).sum()

    def loss_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=-100)


def train_with_ignored_labels(ignored: Callable[[int], bool]) -> tuple[float, float, dict[str, Tensor]]:
    """One step in which the rows (by their place in the global batch) that `ignored` names have no label."""
    training = build_tiny(_sgd(micro_batch_size=3, max_grad_norm=None))
    training.engine._forward._task = TokenTask()
    batch = next(iter(training.loader))
    microbatches = [_without_labels(microbatch, ignored) for microbatch in batch.microbatches]
    result = training.engine.train_step(RankBatch(microbatches, batch.num_rows, batch.num_tokens))
    return result.loss, result.grad_norm, weights(training)


def _without_labels(microbatch: Microbatch, ignored: Callable[[int], bool]) -> Microbatch:
    gone = torch.tensor([ignored(int(row)) for row in microbatch.rows])
    return replace(microbatch, labels=microbatch.labels.masked_fill(gone, -100))


def odd_or_late(row: int) -> bool:
    """Leaves the second of two ranks (the odd rows) without any label."""
    return row % 2 == 1 or row > 6


def uneven(row: int) -> bool:
    """Leaves four labels to the first of two ranks, and five to the second."""
    return row in (0, 2, 5)


def all_rows(row: int) -> bool:
    return True


class TestIgnoredLabels:
    @pytest.mark.parametrize("ignored", [odd_or_late, uneven])
    def test_how_they_lie_over_ranks_changes_nothing(self, ranks: RankPools, ignored):
        loss, norm, expected = train_with_ignored_labels(ignored)
        for found_loss, found_norm, found in ranks(2).run(train_with_ignored_labels, ignored):
            assert found_loss == pytest.approx(loss, rel=1e-5)
            assert found_norm == pytest.approx(norm, rel=1e-4)
            for name, weight in expected.items():
                torch.testing.assert_close(found[name], weight, atol=1e-5, rtol=0)

    def test_a_batch_without_any_label_is_a_step_of_zero(self):
        loss, norm, _ = train_with_ignored_labels(all_rows)
        assert (loss, norm) == (0.0, 0.0)


def test_a_model_that_drops_with_torchs_function_is_refused_in_its_first_step():
    training = tiny()
    forward = training.model.classifier.forward
    training.model.classifier.forward = lambda x: nn.functional.dropout(forward(x), 0.1)
    with pytest.raises(UsageError, match=r"torch's dropout directly.*layout_invariant_dropout"):
        steps(training, 1)


class TestWithoutCache:
    """A cache of keys and values breaks recomputation, and hides the documents of packed rows from transformers."""

    def test_a_head_that_passes_arguments_on(self):
        """The head for questions of a decoder has no argument `use_cache`, but its base model does."""
        sections = {"task": {"type": "question_answering"}, "model": {"config": TINY_DECODERS["llama"]}}
        recomputed, kept = (
            train_tiny(tiny_recipe(**sections, activation_checkpointing=how), num_steps=1) for how in ("full", "none")
        )
        assert recomputed.grad_norms == kept.grad_norms

    def test_a_copy_of_the_strategy_dp(self):
        packed = TINY_TASKS["causal_lm_packed"]
        training = tiny(task={**packed.keys, "logits_chunk": None}, model={**packed.model, "dropout": 0.0})
        batch = next(iter(training.loader))
        (microbatch,) = batch.microbatches
        replica = LossReplica(training.model, training.parts.data.task, None)
        loss = replica(0, microbatch.rows, microbatch.labels, **microbatch.inputs).item()
        num_labels = int((microbatch.labels != IGNORED_LABEL).sum())
        assert loss / num_labels == pytest.approx(training.engine.train_step(batch).loss, rel=1e-6)
