"""The learning rates of these schedules are those of transformers, but for their first step at rate 0."""

from __future__ import annotations

import pytest

from tests.recipe.test_learning_rate import PEAK, TOTAL, factors, of_theirs


@pytest.mark.parametrize("warmup", [0, 7])
@pytest.mark.parametrize(
    ("name", "keys", "arguments"),
    [
        ("cosine_with_restarts", {"cycles": 3}, {"num_cycles": 3}),
        ("polynomial", {"power": 2.0, "min_rate": 0.05}, {"power": 2.0, "lr_end": 0.05 * PEAK}),
        ("inverse_sqrt", {}, {}),
        ("inverse_sqrt", {"timescale": 20}, {"timescale": 20}),
    ],
    ids=str,
)
def test_every_factor_is_theirs(name, keys, arguments, warmup):
    ours = factors(name, warmup, TOTAL, **keys)
    assert ours[warmup:] == pytest.approx(of_theirs(name, warmup, TOTAL, **arguments)[warmup:], rel=1e-12)
    if (name, keys) != ("inverse_sqrt", {}):  # the steps of the warm-up are their time scale
        assert ours == pytest.approx(of_theirs(name, warmup + 1, TOTAL + 1, **arguments)[1:], rel=1e-12)
