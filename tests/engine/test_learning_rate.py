"""The learning rate of every step."""

from __future__ import annotations

import math

import pytest

from trainer.engine.learning_rate import learning_rate_factor
from trainer.recipe.schema import Schedule


def factors(name: str, warmup: int | float, total: int) -> list[float]:
    recipe = Schedule(name=name, warmup=warmup)
    return [learning_rate_factor(recipe, step, total) for step in range(total)]


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
    def test_of_six_steps(self, name, warmup, expected):
        assert factors(name, warmup, 6) == pytest.approx(expected)

    @pytest.mark.parametrize("name", ["linear", "cosine", "constant"])
    @pytest.mark.parametrize("warmup", [0, 1, 7, 0.1, 0.9])
    def test_no_step_is_wasted_and_the_highest_is_reached(self, name, warmup):
        found = factors(name, warmup, 50)
        assert all(0 < factor <= 1 for factor in found)
        assert max(found) == 1.0
        rising = found.index(1.0)
        assert found[: rising + 1] == sorted(found[: rising + 1])
        assert found[rising:] == sorted(found[rising:], reverse=True)

    @pytest.mark.parametrize("name", ["linear", "cosine"])
    def test_after_the_last_step_nothing_is_left(self, name):
        assert learning_rate_factor(Schedule(name=name), 6, 6) == pytest.approx(0.0)
        assert learning_rate_factor(Schedule(name=name), 60, 6) == pytest.approx(0.0)

    def test_one_step_in_all(self):
        assert factors("linear", 0, 1) == [1.0]
        assert factors("cosine", 0.1, 1) == [1.0]
