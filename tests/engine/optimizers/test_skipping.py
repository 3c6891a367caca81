"""A bad step changes no bit, although the host reads its loss and norm one step late: alone, in shards and stages."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from tests.helpers.ranks import RankPools
from tests.helpers.reads import NoReads
from tests.helpers.training import TinyTraining, parallel_keys, tiny_recipe, tiny_training, whole_state
from trainer.engine import native
from trainer.engine.optimizers.skipping import unchanged_if, write_unless
from trainer.engine.results import StepResult
from trainer.parallel.microbatch import RankBatch
from trainer.recipe.schema import Recipe

CASES: dict[str, dict[str, Any]] = {
    "adamw": {},
    "sgd": {"optimizer": {"name": "sgd"}},
    "momentum": {"optimizer": {"name": "sgd", "momentum": 0.9}},
}
BAD = (0, 2)  # momentum begins in a bad step


def _bad_on_last_rank(training: TinyTraining) -> Any:
    """Return a context in which the loss of the last rank is infinite."""
    task = training.engine._forward._task
    loss_sum: Callable[..., torch.Tensor] = task.loss_sum
    if training.mesh.rank != training.mesh.world_size - 1:
        return nullcontext()
    # The class, because an instance cannot be changed.
    return mock.patch.object(type(task), "loss_sum", lambda _, *args: loss_sum(*args) * math.inf)


def _waiting(training: TinyTraining) -> list[StepResult]:
    """Run steps that the host reads at once; it leaves out the update of a bad one."""
    engine, results = training.engine, []
    for number, batch in enumerate(training.loader):
        is_bad = number in BAD
        with (
            _bad_on_last_rank(training) if is_bad else nullcontext(),
            mock.patch.object(engine, "_update") if is_bad else nullcontext(),
        ):
            results.append(engine.train_step(batch))
    return results


def _late(training: TinyTraining) -> list[StepResult]:
    """Run steps that the host reads before the next update; it then examines the rows of a bad one."""
    engine, results = training.engine, []
    reads: list[tuple[RankBatch, Callable[[], StepResult]]] = []
    updates = 0

    def before_update() -> None:
        nonlocal updates
        updates += 1
        for batch, read in reads:
            results.append(read())
            if not results[-1].is_finite:
                with _disable_current_modes():
                    engine.eval_step(batch.microbatches[0])
        reads.clear()

    def begin_read(numbers: torch.Tensor) -> Callable[[], list[float]]:
        begun = updates

        def read() -> list[float]:
            assert updates >= begun + 2, "the host waits for the step that it has begun"
            return numbers.tolist()

        return read

    with mock.patch.object(native, "_begin_read", begin_read):
        for number, batch in enumerate(training.loader):
            # The first pass compares states of generators, to find dropout that has no keys.
            no_reads = NoReads() if number else nullcontext()
            with _bad_on_last_rank(training) if number in BAD else nullcontext(), no_reads:
                reads.append((batch, engine.begin_step(batch, before_update)))
        before_update()
    return results


def differences(recipe: Recipe) -> list[str]:
    """Return the names of the tensors that differ, those of the optimizer's state included."""
    with tiny_training(recipe) as waiting, tiny_training(recipe) as late:
        expected, found = _waiting(waiting), _late(late)
        assert [result.is_finite for result in found] == [number not in BAD for number in range(5)]
        assert list(map(repr, found)) == list(map(repr, expected)), "of NaN, too"
        one, other = (whole_state(training.engine, training.mesh) for training in (waiting, late))
        assert one.scalars == other.scalars
        assert one.tensors.keys() == other.tensors.keys()
        return [name for name, tensor in one.tensors.items() if not torch.equal(tensor, other.tensors[name])]


def _recipe(sections: dict[str, Any]) -> Recipe:
    training = {"max_steps": 5, "global_batch_size": 8, "micro_batch_size": 4, "max_grad_norm": 0.3}
    return tiny_recipe(training=training, **sections)


def assert_late_reads_change_nothing(**sections: Any) -> None:
    """Compare the steps of a host that reads late with those of one that waits."""
    assert differences(_recipe(sections)) == []


def assert_late_reads_change_nothing_on_two_ranks(ranks: RankPools, **sections: Any) -> None:
    """Like `assert_late_reads_change_nothing`, with a bad step on one of two ranks."""
    assert ranks(2).run(differences, _recipe(sections)) == [[], []]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.nightly if case == "sgd" else ()) for case in CASES]
)
def test_late_reads_give_the_steps_of_a_waiting_host(case: str):
    assert_late_reads_change_nothing(**CASES[case])


@pytest.mark.parametrize(
    ("case", "parallel"),
    [
        pytest.param("momentum", parallel_keys("fsdp", 2), marks=pytest.mark.slow),
        pytest.param("adamw", {**parallel_keys("fsdp", 2), "reshard_after_forward": False}, marks=pytest.mark.slow),
        pytest.param("momentum", {"pipeline": {"stages": 2}}, marks=pytest.mark.nightly),
    ],
)
def test_and_on_two_ranks(ranks: RankPools, case: str, parallel: dict[str, Any]):
    assert_late_reads_change_nothing_on_two_ranks(ranks, **CASES[case], parallel=parallel)


def test_a_flag_undoes_changes_of_views():
    whole, other = torch.arange(6.0), torch.ones(2, dtype=torch.int8)
    for flag in (None, torch.zeros(()), torch.ones(())):
        with unchanged_if(flag, whole[2:4], other):
            whole[2:4].fill_(math.nan if flag else 7.0)
            other.add_(1)
    assert whole.tolist() == [0, 1, 7, 7, 4, 5]
    assert other.tolist() == [3, 3]


def test_a_flag_keeps_values_from_being_written():
    whole = torch.arange(6.0).view(3, 2)
    for flag in (torch.ones(()), torch.zeros(()), None):
        new = torch.full((2, 2), 8.0 if flag is None else 7.0)
        write_unless(flag, [whole[0], whole[2]], whole[::2].clone(), new)
        expected = [[0, 1], [4, 5]] if flag else [[8, 8]] * 2 if flag is None else [[7, 7]] * 2
        assert whole[::2].tolist() == expected
    write_unless(torch.ones(()), [whole[1]], whole[1:2], torch.full((1, 2), math.nan))
    assert whole[1].tolist() == [2, 3]
