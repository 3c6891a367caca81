"""Parity of captured passes: a graph reads new rows, new dropout keys and new scalars, and adds to gradients in place.

A tape of operations stands for CUDA graphs here (`tests/helpers/taped.py`); `tests/gpu` has the real ones.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from tests.helpers.ranks import RankPools
from tests.helpers.taped import TapeCapture
from tests.helpers.training import TINY_TASKS, Curve, tiny_recipe, tiny_training
from tests.parity.cases import TOLERANCES, assert_same_curve
from trainer.base.errors import UsageError
from trainer.engine import graphs
from trainer.engine.graphs import CudaCapture
from trainer.parallel.microbatch import Microbatch
from trainer.recipe.schema import Recipe

STEPS = 6
DROPPED = {"model": {"dropout": 0.1}, "data": {"pad_to": 8}, "training": {"micro_batch_size": 4}}


def train(
    recipe: Recipe, graphed: bool, steps: int = STEPS, tapes: list[TapeCapture] | None = None
) -> tuple[Curve, int, int]:
    """Train some steps, and return their curve and the numbers of captures and replays; add the tape to `tapes`."""
    tapes = [] if tapes is None else tapes
    with pytest.MonkeyPatch.context() as patch:

        def capture(device: torch.device) -> TapeCapture:
            tapes.append(
                TapeCapture(
                    lambda: [*(p.grad for p in parameters), schedule._numbers.total],
                    lambda: list(schedule._gradients.values()),
                )
            )
            return tapes[0]

        patch.setattr(graphs, "CudaCapture", capture)
        # As a copy that was begun ahead: it does not know the padding.
        patch.setattr(Microbatch, "to", lambda self, device: replace(self.map(torch.clone), is_padded=None))
        # A mesh may name its device otherwise than its tensors do, as "cuda" and "cuda:0".
        with tiny_training(recipe.model_copy(update={"cuda_graphs": graphed}), device="cpu:0") as training:
            parameters = list(training.engine.parameters.values())
            schedule = training.engine._schedule
            results = training.steps(steps)
            curve = Curve([result.loss for result in results], [result.grad_norm for result in results])
    return curve, sum(tape.num_captures for tape in tapes), sum(tape.num_replays for tape in tapes)


@pytest.mark.parametrize(
    "precision", ["fp32", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bf16", "fp16"))]
)
def test_captured_passes_equal_eager_passes_bit_for_bit(precision: str):
    recipe = tiny_recipe(**DROPPED, precision=precision)
    expected, *none = train(recipe, graphed=False)
    found, captures, replays = train(recipe, graphed=True)
    assert none == [0, 0]
    assert replays > captures > 1, "several shapes, each captured once"
    assert found.losses == expected.losses
    assert found.grad_norms == expected.grad_norms


def test_the_first_graph_of_a_step_adds_to_no_gradient():
    tapes: list[TapeCapture] = []
    train(tiny_recipe(model={"dropout": 0.1}, data={"pad_to": 32}, training={"micro_batch_size": 4}), True, 2, tapes)
    first, further = tapes[0].added
    assert first == 0 < further


def test_two_data_ranks_sum_the_gradients_of_their_graphs(ranks: RankPools):
    recipe = tiny_recipe(**DROPPED)
    expected, *_ = train(recipe, graphed=False)
    for found, _, replays in ranks(2).run(train, recipe, True):
        assert replays
        assert_same_curve(found, expected, TOLERANCES["fp32"])


@pytest.mark.parametrize(
    "task",
    [
        pytest.param(name, marks=() if tiny.graphs_refusal or name == "masked_lm" else pytest.mark.nightly)
        for name, tiny in TINY_TASKS.items()
    ],
)
def test_each_task_is_captured_or_refused(task: str):
    if refusal := TINY_TASKS[task].graphs_refusal:
        with pytest.raises(UsageError, match=re.escape(f"`cuda_graphs` is true, but {refusal}")):
            train(_recipe_of(task), graphed=True, steps=2)
    else:
        assert_is_captured(task)


def _recipe_of(task: str) -> Recipe:
    return tiny_recipe(task=TINY_TASKS[task].keys, training={"micro_batch_size": 4}, data={"pad_to": 32})


def assert_is_captured(task: str) -> None:
    """Compare captured passes of a task with eager ones."""
    recipe = _recipe_of(task)
    expected, *_ = train(recipe, graphed=False, steps=2)
    found, captures, replays = train(recipe, graphed=True, steps=2)
    # The microbatches of the first step run eagerly; then there are one graph that writes gradients and one that adds.
    assert (captures, replays) == (2, 3)
    # A CPU may add the numbers of a tensor at another place in memory in another order.
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    assert found.grad_norms == pytest.approx(expected.grad_norms, rel=1e-6)


def test_a_read_of_the_device_is_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    recipe = tiny_recipe(data={"pad_to": 32})
    monkeypatch.setattr(graphs.GraphedSchedule, "_pass", lambda self, rows, numbers: numbers.total.item())
    with pytest.raises(UsageError, match=r"cannot be captured \(operation not permitted when stream is capturing"):
        train(recipe, graphed=True)


def test_too_many_shapes_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(graphs, "MOST_SHAPES", 1)
    with pytest.raises(UsageError, match="more than 1 shapes, and each has a graph"):
        train(tiny_recipe(**DROPPED), graphed=True)


def test_a_cpu_is_refused():
    with pytest.raises(UsageError, match="needs an NVIDIA GPU, but the device is cpu; set it to false"):
        CudaCapture(torch.device("cpu"))
