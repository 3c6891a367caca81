"""fp16: the loss scale follows what the gradients allow, and all ranks skip a step together."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
from trainer.base.errors import ExitCode, NonFiniteError
from trainer.engine import scaling
from trainer.engine.engine import StepResult
from trainer.engine.scaling import LossScaler, settle
from trainer.recipe.schema import Recipe

GOOD = StepResult(loss=1.0, grad_norm=1.0, learning_rate=0.1)
OVERFLOW = StepResult(loss=1.0, grad_norm=float("inf"), learning_rate=0.1)


class TestLossScaler:
    def test_halves_at_an_overflow_and_counts_it(self):
        scaler = LossScaler(scale=1024.0, good_steps=7)
        scaler.overflow()
        assert scaler == LossScaler(scale=512.0, good_steps=0, skipped_steps=1)

    def test_doubles_after_the_interval_and_not_before(self, monkeypatch):
        monkeypatch.setattr(scaling, "_GROWTH_INTERVAL", 3)
        scaler, scales = LossScaler(scale=8.0), []
        for good in (True, True, False, True, True, True, True, True, True):
            scaler.good() if good else scaler.overflow()
            scales.append(scaler.scale)
        assert scales == [8, 8, 4, 4, 4, 8, 8, 8, 16]

    def test_a_scale_that_collapses_ends_the_run(self):
        scaler = LossScaler(scale=2.0)
        scaler.overflow()
        with pytest.raises(NonFiniteError, match="the loss scale of fp16 fell below 1 after 2 skipped") as error:
            scaler.overflow()
        assert error.value.exit_code is ExitCode.NON_FINITE == 3

    def test_its_state_comes_back(self):
        scaler, other = LossScaler(3.0, 5, 7), LossScaler()
        other.load_state(scaler.state())
        assert other == scaler


class TestSettle:
    def test_without_a_scaler_a_step_stays_as_it_is(self):
        assert settle(GOOD, None) == GOOD
        assert settle(OVERFLOW, None) == OVERFLOW

    def test_with_one_it_is_skipped_and_counted(self):
        scaler = LossScaler()
        assert settle(GOOD, scaler).skipped_steps == 0
        assert settle(OVERFLOW, scaler).skipped_steps == 1
        assert settle(GOOD, scaler).skipped_steps == 1
        assert scaler.scale == 2.0**15

    def test_the_scale_is_to_blame_for_a_gradient_and_not_for_a_loss(self):
        assert OVERFLOW.is_bad
        assert not replace(OVERFLOW, loss_scale=8.0).is_bad
        assert replace(GOOD, loss=float("nan"), loss_scale=8.0).is_bad
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


@pytest.mark.parametrize("strategy", RANK_STRATEGIES)
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
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


@pytest.mark.parametrize("strategy", RANK_STRATEGIES)
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


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2"])
def test_the_scale_grows_where_the_gradients_allow(ranks: RankPools, strategy):
    assert ranks(2).run(grow, fp16(strategy, 2))[0] == [2.0**16, 2.0**16, 2.0**17, 2.0**17, 2.0**18]


def scale_does_not_matter(recipe: Recipe) -> list[tuple[float, float]]:
    """Loss and norm of two steps, from a scale of 16."""
    with tiny_training(recipe) as training:
        training.engine._scaler.scale = 16.0
        return [(result.loss, result.grad_norm) for result in training.steps(2)]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1", "zero3"])
def test_loss_and_norm_are_unscaled(ranks: RankPools, strategy):
    found = ranks(2).run(scale_does_not_matter, fp16(strategy, 2))[0]
    exact = ranks(2).run(overflow_in_the_third_step, fp16(strategy, 2))[0].results[:2]
    for (loss, norm), result in zip(found, exact, strict=True):
        assert loss == pytest.approx(result.loss, rel=1e-3)
        assert norm == pytest.approx(result.grad_norm, rel=1e-2)


def resume_the_scaler(recipe: Recipe) -> tuple[LossScaler, list[StepResult], list[StepResult]]:
    """The scaler as another engine finds it, and the two last steps of both."""
    with tiny_training(recipe) as training, tiny_training(recipe) as other:
        first, second, *rest = training.loader
        with _Overflowing(training):
            training.engine.train_step(first)
        training.engine.train_step(second)
        other.engine.load_state(whole_state(training.engine, training.mesh), 2)
        found = LossScaler(**vars(other.engine._scaler))
        expected = [training.engine.train_step(batch) for batch in rest]
        return found, expected, [other.engine.train_step(batch) for batch in rest]


@pytest.mark.parametrize("strategy", RANK_STRATEGIES)
def test_the_scaler_is_part_of_the_state(ranks: RankPools, strategy):
    for scaler, expected, found in ranks(2).run(resume_the_scaler, fp16(strategy, 2)):
        assert scaler == LossScaler(scale=2.0**15, good_steps=1, skipped_steps=1)
        assert found == expected, "the schedule remembers the skipped step"
