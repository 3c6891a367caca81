"""fp16: the loss scale follows what the gradients allow, and all ranks skip a step together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.ranks import RankPools
from tests.helpers.training import (
    RANK_STRATEGIES,
    TinyTraining,
    parallel_keys,
    tiny_recipe,
    tiny_training,
    whole_state,
)
from tests.helpers.turns import once
from trainer.base.errors import ExitCode, NonFiniteError
from trainer.engine.results import StepResult
from trainer.features.fp16 import scaling
from trainer.features.fp16.scaling import DynamicScaler
from trainer.parallel.norms import largest_element
from trainer.recipe.schema import Recipe

GOOD = StepResult(loss=1.0, grad_norm=1.0, learning_rate=0.1, loss_scale=8.0)
OVERFLOW = replace(GOOD, grad_norm=float("inf"))


def scaler_of(scale: float, good_steps: int = 0, skipped_steps: int = 0) -> DynamicScaler:
    scaler = DynamicScaler(torch.device("cpu"))
    values = {"scale": scale, "good_steps": good_steps, "skipped_steps": skipped_steps}
    scaler.load_state({f"loss_scaler.{key}": value for key, value in values.items()})
    return scaler


def steps_of(scaler: DynamicScaler, *are_good: bool) -> list[float]:
    """Return the scale after each step."""
    scales = []
    for is_good in are_good:
        result = replace(GOOD if is_good else OVERFLOW, loss_scale=scaler.scale.item())
        scaler.update(torch.tensor(0.0 if is_good else 1.0))
        scaler.settle(result)
        scales.append(scaler.scale.item())
    return scales


class TestLossScaler:
    def test_halves_at_an_overflow_and_counts_it(self):
        scaler = scaler_of(1024.0, good_steps=7)
        steps_of(scaler, False)
        assert scaler.state() == scaler_of(512.0, good_steps=0, skipped_steps=1).state()

    def test_doubles_after_the_interval_and_not_before(self, monkeypatch):
        monkeypatch.setattr(scaling, "_GROWTH_INTERVAL", 3)
        scales = steps_of(scaler_of(8.0), True, True, False, True, True, True, True, True, True)
        assert scales == [8, 8, 4, 4, 4, 8, 8, 8, 16]

    def test_a_scale_that_collapses_ends_the_run(self):
        scaler = scaler_of(2.0)
        steps_of(scaler, False)
        with pytest.raises(NonFiniteError, match="the loss scale of fp16 fell below 1 after 2 skipped") as error:
            steps_of(scaler, False)
        assert error.value.exit_code is ExitCode.NON_FINITE == 3

    def test_its_state_comes_back(self):
        state = scaler_of(3.0, 5, 7).state()
        assert state == {"loss_scaler.scale": 3.0, "loss_scaler.good_steps": 5, "loss_scaler.skipped_steps": 7}

    def test_skipped_steps_are_counted_when_they_are_read(self):
        scaler = scaler_of(8.0)
        assert [scaler.settle(result).skipped_steps for result in (GOOD, OVERFLOW, GOOD)] == [0, 1, 1]

    def test_the_scale_is_to_blame_for_a_gradient_and_not_for_a_loss(self):
        assert replace(OVERFLOW, loss_scale=None).is_bad
        assert not OVERFLOW.is_bad
        assert replace(GOOD, loss=float("nan")).is_bad
        assert not GOOD.is_bad


def fp16(strategy: str, world_size: int, **sections: Any) -> Recipe:
    training = {"max_steps": 5, "micro_batch_size": 2}
    return tiny_recipe(training=training, precision="fp16", parallel=parallel_keys(strategy, world_size), **sections)


@dataclass
class Story:
    """What a rank saw of five steps, of which the third overflows on the last rank alone."""

    results: list[StepResult]
    unchanged: bool  # weights and moments over the third step
    changed: bool  # over the fourth


class _Overflowing:
    """The task's sum of losses, with one infinite element in the gradient of its logits."""

    def __init__(self, training: TinyTraining) -> None:
        self._task = training.engine._forward._task
        self._loss_sum = self._task.loss_sum

    def __enter__(self) -> None:
        object.__setattr__(self._task, "loss_sum", self._poisoned)

    def __exit__(self, *_: Any) -> None:
        object.__delattr__(self._task, "loss_sum")

    def _poisoned(self, logits: Tensor, labels: Tensor) -> Tensor:
        logits.register_hook(_with_an_infinity)
        return self._loss_sum(logits, labels)


def _with_an_infinity(gradient: Tensor) -> Tensor:
    gradient = gradient.clone()
    gradient[0, 0] = float("inf")
    return gradient


def _training_state(training: TinyTraining) -> dict[str, Tensor]:
    """Weights and moments, without the scaler's own; all ranks must call it."""
    return whole_state(training.engine, training.mesh).tensors


def _equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def overflow_in_the_third_step(recipe: Recipe) -> Story:
    with tiny_training(recipe) as training:
        engine, mesh = training.engine, training.mesh
        first, second, third, fourth, fifth = training.loader
        results = [engine.train_step(first), engine.train_step(second)]
        before = _training_state(training)
        if mesh.rank == mesh.world_size - 1:
            with _Overflowing(training):
                results.append(engine.train_step(third))
        else:
            results.append(engine.train_step(third))
        after = _training_state(training)
        results += [engine.train_step(fourth), engine.train_step(fifth)]
        last = _training_state(training)
        return Story(results, mesh.share(_equal(before, after)), mesh.share(not _equal(after, last)))


STRATEGIES = [
    pytest.param(name, marks=() if name in ("fsdp", "zero2") else pytest.mark.slow) for name in RANK_STRATEGIES
]


@pytest.mark.parametrize(
    ("world_size", "strategy"),
    [
        *((2, name) for name in ("ddp", "fsdp", "zero2")),
        pytest.param(2, "zero3", marks=pytest.mark.slow),
        pytest.param(4, "hsdp", marks=pytest.mark.slow),  # two axes
        *(pytest.param(2, name, marks=pytest.mark.nightly) for name in ("hsdp", "zero1")),
        *(pytest.param(4, name, marks=pytest.mark.nightly) for name in RANK_STRATEGIES if name != "hsdp"),
    ],
)
def test_an_overflow_on_one_rank_is_skipped_by_all(ranks: RankPools, strategy, world_size):
    stories = ranks(world_size).run(overflow_in_the_third_step, fp16(strategy, world_size))
    for story in stories:
        assert story.unchanged
        assert story.changed
        assert [result.skipped_steps for result in story.results] == [0, 0, 1, 1, 1]
        assert [result.loss_scale for result in story.results] == [2.0**16] * 3 + [2.0**15] * 2
        assert [result.is_finite for result in story.results] == [True, True, False, True, True]
        rates = [result.learning_rate for result in story.results]
        assert rates[3] == rates[2], "the schedule waits"
        assert rates[1] > rates[2] > rates[4]
        finite = [result for result in story.results if result.is_finite]
        expected = [result for result in stories[0].results if result.is_finite]
        assert finite == expected, "all ranks see the same"


def collapse(recipe: Recipe) -> str:
    with tiny_training(recipe) as training, _Overflowing(training):
        batch = next(iter(training.loader))
        for taken in range(20):
            try:
                training.engine.train_step(batch)
            except NonFiniteError as error:
                return f"{taken} skipped: {error}"
    return "no error"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_collapse_ends_the_run_on_every_rank(ranks: RankPools, strategy):
    for found in ranks(2).run(collapse, fp16(strategy, 2)):
        assert found.startswith("16 skipped: the loss scale of fp16 fell below 1 after 17 skipped steps")


def grow(recipe: Recipe) -> list[float]:
    interval, scaling._GROWTH_INTERVAL = scaling._GROWTH_INTERVAL, 2
    try:
        with tiny_training(recipe) as training:
            return [result.loss_scale for result in training.steps(5)]
    finally:
        scaling._GROWTH_INTERVAL = interval


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp", "zero2"])
def test_the_scale_grows_where_the_gradients_allow(ranks: RankPools, strategy):
    assert ranks(2).run(grow, fp16(strategy, 2))[0] == [2.0**16, 2.0**16, 2.0**17, 2.0**17, 2.0**18]


def scale_does_not_matter(recipe: Recipe) -> list[tuple[float, float]]:
    """Loss and norm of two steps, from a scale of 16."""
    with tiny_training(recipe) as training:
        training.engine._scaler.scale.fill_(16.0)
        return [(result.loss, result.grad_norm) for result in training.steps(2)]


@pytest.mark.parametrize(
    "strategy",
    [
        "ddp",
        pytest.param("zero3", marks=pytest.mark.slow),
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("fsdp", "zero1")),
    ],
)
def test_loss_and_norm_are_unscaled(ranks: RankPools, strategy):
    found = ranks(2).run(scale_does_not_matter, fp16(strategy, 2))[0]
    exact = ranks(2).run(overflow_in_the_third_step, fp16(strategy, 2))[0].results[:2]
    for (loss, norm), result in zip(found, exact, strict=True):
        assert loss == pytest.approx(result.loss, rel=1e-3)
        assert norm == pytest.approx(result.grad_norm, rel=1e-2)


def resume_the_scaler(recipe: Recipe) -> tuple[dict[str, float], list[StepResult], list[StepResult]]:
    """The scaler as another engine finds it, and the two last steps of both."""
    with tiny_training(recipe) as training, tiny_training(recipe) as other:
        first, second, *rest = training.loader
        with _Overflowing(training):
            training.engine.train_step(first)
        training.engine.train_step(second)
        other.engine.load_state(whole_state(training.engine, training.mesh), 2)
        found = other.engine._scaler.state()
        expected = [training.engine.train_step(batch) for batch in rest]
        return found, expected, [other.engine.train_step(batch) for batch in rest]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_scaler_is_part_of_the_state(ranks: RankPools, strategy):
    for state, expected, found in ranks(2).run(resume_the_scaler, fp16(strategy, 2)):
        assert state == scaler_of(2.0**15, good_steps=1, skipped_steps=1).state()
        assert found == expected, "the schedule remembers the skipped step"


# Of the first batch, the whole gradient has a larger element than its parts; of the fourth, each part has a larger one.
BORDER_BATCHES = (0, 3)


def largest_elements(recipe: Recipe) -> list[tuple[float, float]]:
    """Return the largest element of the gradient of each border batch, and that of its microbatches."""
    found = []
    with tiny_training(recipe) as training:
        engine, batches = training.engine, list(islice(training.loader, BORDER_BATCHES[-1] + 1))
        for batch in (batches[number] for number in BORDER_BATCHES):
            parts = []
            with engine._forward.step(0, batch):
                for microbatch in batch.microbatches:
                    engine._schedule.run([microbatch], engine._forward.denominator(batch), torch.ones(()))
                    parts.append([parameter.grad for parameter in engine.parameters.values()])
                    engine.optimizer.zero_grad(set_to_none=True)
            whole = [torch.stack(gradients).sum(0) for gradients in zip(*parts, strict=True)]
            of_whole, *of_parts = (float(largest_element(g, torch.device("cpu"))) for g in (whole, *parts))
            found.append((of_whole, max(of_parts)))
    return found


def skips_at_the_border(recipe: Recipe, largest: Sequence[float]) -> list[list[bool]]:
    """Return for each border batch whether a step is skipped with its largest element above and below the border."""
    found = []
    for number, most in zip(BORDER_BATCHES, largest, strict=True):
        with tiny_training(recipe) as training:
            batch = next(islice(training.loader, number, None))
            skipped = []
            for factor in (1.01, 0.99):  # a skipped step changes no weights
                training.engine._scaler.scale.fill_(factor * 65504 / most)
                skipped.append(not training.engine.train_step(batch).is_finite)
            found.append(skipped)
    return found


def at_the_border(**sections: Any) -> Recipe:
    training = {"micro_batch_size": 3, **sections.pop("training", {})}
    return tiny_recipe(training=training, precision="fp16", **sections)


@pytest.mark.parametrize(
    ("world_size", "sections"),
    [
        (1, {"training": {"micro_batch_size": 12}}),
        (1, {}),
        (1, {"activation_checkpointing": "full"}),
        (2, {"parallel": {"strategy": "ddp"}}),
        (2, {"parallel": {"strategy": "fsdp"}}),
        (2, {"parallel": {"strategy": "zero2"}}),
        *(
            pytest.param(world_size, {"parallel": parallel}, marks=pytest.mark.slow)
            for world_size, parallel in (
                (2, {"strategy": "zero3"}),
                (2, {"strategy": "ddp", "tensor": 2}),
                (2, {"strategy": "ddp", "pipeline": {"stages": 2}}),
            )
        ),
        *(
            pytest.param(world_size, sections, marks=pytest.mark.nightly)
            for world_size, sections in (
                (2, {"parallel": {"strategy": "zero1"}}),
                (2, {"parallel": {"strategy": "zero2", "offload": "optimizer"}}),
                (2, {"parallel": {"strategy": "zero3", "offload": "optimizer"}}),
                (2, {"parallel": {"strategy": "fsdp", "offload": "parameters"}}),
                (2, {"parallel": {"strategy": "ddp", "context": 2}}),
                (2, {"parallel": {"strategy": "ddp", "communication": {"gradients": "bf16"}}}),
                (4, {"parallel": parallel_keys("hsdp", 4)}),
                (4, {"parallel": {"strategy": "zero2", "tensor": 2}}),
                (4, {"parallel": {"strategy": "fsdp", "pipeline": {"stages": 2}}}),
            )
        ),
    ],
    ids=str,
)
def test_every_layout_skips_the_same_steps(ranks: RankPools, world_size: int, sections: dict[str, Any]):
    """Sums over rows pass the largest number of fp16 in parts of a batch and not in the whole, and the other way."""
    elements = once("largest elements in fp16", lambda: largest_elements(at_the_border()))
    (whole, part), (small, large) = elements
    assert part < 0.9 * whole
    assert large > 1.5 * small
    recipe, largest = at_the_border(**sections), [whole, small]
    for found in ranks(world_size).run(skips_at_the_border, recipe, largest):
        assert found == [[True, False]] * 2
