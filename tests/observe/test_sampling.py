"""The shares of a step."""

from __future__ import annotations

import pytest

from trainer.observe.sampling import parts


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
