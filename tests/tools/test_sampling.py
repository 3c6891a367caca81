"""The shares of a step."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import profile

from trainer.observe.meter import Meter
from trainer.tools.sampling import LEAST_STEPS, Sampler
from trainer.tools.step_profile import parts
from trainer.training.run_tool import Elapsed


@pytest.mark.parametrize(
    ("computes", "communicates", "expected"),
    [
        ([], [], (0.0, 0.0, 1.0)),
        ([(10, 60)], [(40, 80)], (0.5, 0.2, 0.3)),
        ([(10, 20), (12, 18), (15, 30), (50, 60)], [], (0.3, 0.0, 0.7)),
        ([(-50, 20), (90, 200)], [(0, 100)], (0.3, 0.7, 0.0)),
        ([(10, 20)], [(-9, -1), (120, 130)], (0.1, 0.0, 0.9)),
    ],
    ids=["nothing", "hidden in part", "nested", "across the borders", "outside"],
)
def test_parts_of_a_step(
    computes: list[tuple[float, float]], communicates: list[tuple[float, float]], expected: tuple[float, float, float]
):
    assert parts((0, 100), computes, communicates) == pytest.approx(expected)


def test_a_profiler_of_a_callback_keeps_its_events():
    sampler = Sampler(Meter(), "cpu")
    sampler.plan(Elapsed(LEAST_STEPS, 100.0, left=0))
    with profile() as of_callback, sampler.sampled():
        torch.ones(4).sum()
    assert "aten::sum" in {event.name for event in of_callback.events()}
    with sampler.sampled():
        torch.ones(4).sum()
    assert sum(sampler.take()) > 0


def test_a_long_training_is_sampled_early_and_a_short_one_never():
    def is_due(steps: int, seconds: float, left: int) -> bool:
        sampler = Sampler(Meter(), "cuda")
        sampler.plan(Elapsed(steps, seconds, left))
        return sampler.is_due

    assert is_due(LEAST_STEPS, 10.0, left=19 * LEAST_STEPS)  # 200 s in all
    assert not is_due(LEAST_STEPS, 10.0, left=18 * LEAST_STEPS)
    assert not is_due(LEAST_STEPS - 1, 1000.0, left=10**6)
