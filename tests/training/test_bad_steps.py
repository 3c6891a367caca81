"""A step that is not finite on one rank is taken by none, and the rows that gave it are found."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.ranks import RankPools
from tests.helpers.training import RANK_STRATEGIES, TinyTraining, parallel_keys, tiny_recipe, tiny_training, whole_state
from trainer.observe.records import BadStepRecord
from trainer.recipe.schema import Recipe
from trainer.training.bad_steps import describe, examine


@dataclass
class Story:
    """What a rank saw of four steps, of which the second is bad on the last rank alone."""

    record: BadStepRecord
    finite: list[bool]
    rates: list[float]
    unchanged: bool  # weights and moments over the second step
    changed: bool  # over the third
    expected_rows: list[int]  # of the bad microbatch, on rank 0


class _Bad:
    """The task's sum of losses, `value` in the first microbatch that it is asked for, and whenever it sees it again."""

    def __init__(self, training: TinyTraining, value: float, finite_gradient: bool) -> None:
        self._task = training.engine._forward._task
        self._loss_sum = self._task.loss_sum
        self._value, self._finite_gradient = value, finite_gradient
        self.labels: Tensor | None = None

    def __enter__(self) -> _Bad:
        object.__setattr__(self._task, "loss_sum", self._poisoned)
        return self

    def __exit__(self, *_: Any) -> None:
        object.__delattr__(self._task, "loss_sum")

    def _poisoned(self, logits: Tensor, labels: Tensor) -> Tensor:
        loss = self._loss_sum(logits, labels)
        if self.labels is None:
            self.labels = labels
        if not torch.equal(self.labels, labels):
            return loss
        return loss + self._value if self._finite_gradient else loss * self._value


def _equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def _state(training: TinyTraining) -> dict[str, Tensor]:
    return whole_state(training.engine, training.mesh).tensors


def second_step_is_bad(recipe: Recipe, value: float, finite_gradient: bool) -> Story:
    with tiny_training(recipe) as training:
        engine, mesh, loader = training.engine, training.mesh, training.loader
        first, second, third, _ = loader
        results = [engine.train_step(first)]
        before = _state(training)
        if mesh.rank == mesh.world_size - 1:
            with _Bad(training, value, finite_gradient):
                results.append(engine.train_step(second))
                record = examine(2, results[-1], second, loader.row_ids(1), engine, mesh)
        else:
            results.append(engine.train_step(second))
            record = examine(2, results[-1], second, loader.row_ids(1), engine, mesh)
        after = _state(training)
        results.append(engine.train_step(third))
        last = _state(training)
        places = [microbatch.rows.tolist() for microbatch in second.microbatches if not microbatch.filler]
        places_of_last = mesh.gather(places[0])
        return Story(
            record,
            [result.is_finite for result in results],
            [result.learning_rate for result in results],
            mesh.share(_equal(before, after)),
            mesh.share(not _equal(after, last)),
            mesh.share(
                sorted(int(loader.row_ids(1)[place]) for place in places_of_last[-1]) if places_of_last else None
            ),
        )


MARKS: dict[str, Any] = {"fsdp": (), "zero3": pytest.mark.slow}


@pytest.mark.parametrize(
    ("strategy", "value", "finite_gradient"),
    [
        *(pytest.param(name, math.nan, False, marks=MARKS.get(name, pytest.mark.nightly)) for name in RANK_STRATEGIES),
        ("ddp", math.inf, True),
        pytest.param("zero2", math.inf, True, marks=pytest.mark.slow),
    ],
)
def test_a_bad_loss_on_one_rank_is_located_and_skipped_by_all(ranks: RankPools, strategy, value, finite_gradient):
    training = {"max_steps": 4, "global_batch_size": 8, "micro_batch_size": 2}
    recipe = tiny_recipe(training=training, parallel=parallel_keys(strategy, 2))
    first, *others = ranks(2).run(second_step_is_bad, recipe, value, finite_gradient)
    for story in (first, *others):
        assert story.finite == [True, False, True]
        assert story.unchanged
        assert story.changed
        assert story.rates[0] > story.rates[1] > story.rates[2], "the schedule goes on"
        assert story.record == first.record or math.isnan(story.record.loss)
        assert story.record.ranks == (1,)
        assert list(story.record.rows) == story.expected_rows
        assert len(story.record.rows) == 2


def every_loss_is_bad(recipe: Recipe) -> tuple[BadStepRecord, list[int]]:
    """What is found where the last rank computes no finite loss, and the rows of the batch."""
    with tiny_training(recipe) as training:
        first, *_ = training.loader
        task = training.engine._forward._task
        loss_sum = task.loss_sum
        if training.mesh.rank == training.mesh.world_size - 1:
            object.__setattr__(task, "loss_sum", lambda logits, labels: loss_sum(logits, labels) * math.nan)
        result = training.engine.train_step(first)
        rows = training.loader.row_ids(0)
        return examine(1, result, first, rows, training.engine, training.mesh), sorted(rows)


@pytest.mark.parametrize("parallel", [{"pipeline": {"stages": 2}}, {"tensor": 2}])
def test_ranks_that_share_rows_locate_them(ranks: RankPools, parallel):
    for record, rows in ranks(2).run(every_loss_is_bad, tiny_recipe(parallel=parallel)):
        assert record.ranks == (1,)
        assert list(record.rows) == rows


class TestDescription:
    def test_names_rows_and_ranks(self):
        text = describe(BadStepRecord(3, math.nan, math.nan, (1,), tuple(range(40))))
        assert text.startswith("step 3: the loss is nan and the gradient norm nan; it is not finite on rank 1, among")
        assert "rows 0, 1, 2" in text
        assert "31 and 8 more of the training split" in text

    def test_says_where_the_gradient_alone_is_to_blame(self):
        assert "the gradient is not" in describe(BadStepRecord(3, 1.0, math.inf, (), ()))
        assert "without dropout" in describe(BadStepRecord(3, math.inf, math.inf, (), ()))
