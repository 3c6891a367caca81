"""The learning rate of every step."""

from __future__ import annotations

import math

import pytest
import torch

from trainer.recipe.registered import schedule_sections
from trainer.recipe.schema import ScheduleKeys

TOTAL = 50
PEAK = 0.1


def schedule(name: str, **keys: object) -> ScheduleKeys:
    return schedule_sections()[name].model_validate({"name": name, **keys})


def factors(name: str, warmup: int | float, total: int, **keys: object) -> list[float]:
    return [schedule(name, warmup=warmup, **keys).factor(step, total) for step in range(total)]


class TestLearningRate:
    @pytest.mark.parametrize(
        ("name", "warmup", "expected"),
        [
            ("constant", 0, [1, 1, 1, 1, 1, 1]),
            ("constant", 2, [1 / 3, 2 / 3, 1, 1, 1, 1]),
            ("linear", 0, [1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
            ("linear", 2, [1 / 3, 2 / 3, 1, 3 / 4, 2 / 4, 1 / 4]),
            ("linear", 0.5, [1 / 4, 2 / 4, 3 / 4, 1, 2 / 3, 1 / 3]),
            ("cosine", 2, [1 / 3, 2 / 3, 1, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125)]),
            ("linear", 6, [1 / 7, 2 / 7, 3 / 7, 4 / 7, 5 / 7, 6 / 7]),
            ("linear", 100, [step / 101 for step in range(1, 7)]),
        ],
    )
    def test_of_a_run_of_six_steps(self, name, warmup, expected):
        assert factors(name, warmup, 6) == pytest.approx(expected)

    @pytest.mark.parametrize("name", [name for name in schedule_sections() if name != "cosine_with_restarts"])
    @pytest.mark.parametrize("warmup", [0, 1, 7, 0.1, 0.9])
    def test_no_step_is_wasted_and_the_highest_is_reached(self, name, warmup):
        found = factors(name, warmup, 50)
        assert all(0 < factor <= 1 for factor in found)
        assert max(found) == 1.0
        rising = found.index(1.0)
        assert found[: rising + 1] == sorted(found[: rising + 1])
        assert found[rising:] == sorted(found[rising:], reverse=True)

    @pytest.mark.parametrize("name", [name for name in schedule_sections() if name not in ("constant", "inverse_sqrt")])
    def test_after_the_last_step_nothing_is_left(self, name):
        assert schedule(name).factor(6, 6) == pytest.approx(0.0)
        assert schedule(name).factor(60, 6) == pytest.approx(0.0)

    def test_one_step_in_all(self):
        assert factors("linear", 0, 1) == [1.0]
        assert factors("cosine", 0.1, 1) == [1.0]
        assert factors("warmup_stable_decay", 0, 1) == [1.0]

    def test_a_decay_is_no_longer_than_the_steps_after_the_warmup(self):
        assert factors("warmup_stable_decay", 2, 6, decay=100, decay_shape="linear") == factors("linear", 2, 6)


def of_theirs(name: str, warmup: int, total: int, **arguments: object) -> list[float]:
    """Return the factors of a schedule of transformers."""
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.zeros(())], lr=PEAK)
    (factor,) = get_scheduler(name, optimizer, warmup, total, arguments).lr_lambdas
    return [factor(step) for step in range(total)]


class TestAgainstTransformers:
    """Their schedule has a first step at rate 0 that ours leaves out, and one more step of warm-up, if any."""

    @pytest.mark.parametrize("warmup", [0, 7])
    @pytest.mark.parametrize(
        ("name", "keys", "theirs", "arguments"),
        [
            ("linear", {}, "linear", {}),
            ("constant", {}, "constant_with_warmup", {}),
            ("cosine", {}, "cosine", {}),
            ("cosine", {"min_rate": 0.1}, "cosine_with_min_lr", {"min_lr_rate": 0.1}),
            ("cosine", {"min_rate": 0.1}, "cosine_with_min_lr", {"min_lr": 0.1 * PEAK}),
            *(
                (
                    "warmup_stable_decay",
                    {"decay": 20, "decay_shape": shape, "min_rate": 0.1},
                    "warmup_stable_decay",
                    {"num_decay_steps": 20, "decay_type": shape, "min_lr_ratio": 0.1},
                )
                for shape in ("linear", "cosine", "1-sqrt")
            ),
        ],
        ids=str,
    )
    def test_every_factor_is_theirs(self, name, keys, theirs, arguments, warmup):
        ours = factors(name, warmup, TOTAL, **keys)
        assert ours[warmup:] == pytest.approx(of_theirs(theirs, warmup, TOTAL, **arguments)[warmup:], rel=1e-12)
        assert ours == pytest.approx(of_theirs(theirs, warmup + 1, TOTAL + 1, **arguments)[1:], rel=1e-12)
