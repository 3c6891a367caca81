"""The README's table of differences and the file with its figures."""

from __future__ import annotations

import json

import pytest

from docs.generate import PARITY
from tests.helpers.ranks import RankPools
from tests.parity.cases import TOLERANCES
from tests.parity.measure import (
    COLUMNS,
    EXPERT_LAYOUTS,
    LAYOUTS,
    OF_EXPERTS,
    WITHOUT,
    Measured,
    label,
    weights_in_bf16,
)

BF16_EPSILON = 2**-7
BOUNDS = (1e-5, 1e-4, BF16_EPSILON, 4 * BF16_EPSILON, 1e-5, 1e-11)  # the guarantee, by column


def is_within_the_promise(cells: list[float]) -> bool:
    return all(cell <= bound for cell, bound in zip(cells, BOUNDS, strict=True))


def is_beyond_it_everywhere(cells: list[float]) -> bool:
    return all(cell > bound for cell, bound in zip(cells, BOUNDS, strict=True))


def test_shown_tolerances_equal_the_measured_and_promised():
    shown = json.loads(PARITY.read_text(encoding="utf-8"))
    rows = {row["layout"]: row["differences"] for row in shown["rows"]}
    assert shown["columns"] == list(COLUMNS)
    assert list(rows) == [*(label(*layout) for layout in LAYOUTS), WITHOUT]
    assert is_beyond_it_everywhere(rows.pop(WITHOUT)), "the table would show a failure"
    assert all(map(is_within_the_promise, rows.values()))
    experts = {row["layout"]: row["differences"] for row in shown["experts"]}
    assert list(experts) == list(EXPERT_LAYOUTS)
    assert all(map(is_within_the_promise, experts.values()))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_table_is_within_the_promise(ranks: RankPools):
    measured = Measured(ranks)
    cells = measured.differences(2, 2)
    assert is_within_the_promise(cells), cells
    torchs_own = measured.differences(2, 6, layout_invariant_dropout=False)
    assert is_beyond_it_everywhere(torchs_own), torchs_own


@pytest.mark.nightly
@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
def test_the_table_of_experts_is_within_the_promise(ranks: RankPools, layout: str):
    cells = Measured(ranks, **OF_EXPERTS).differences(*EXPERT_LAYOUTS[layout])
    assert is_within_the_promise(cells), cells


@pytest.mark.nightly
def test_weights_in_bf16_are_within_the_promise_at_a_small_rate_only(ranks: RankPools):
    limits = (TOLERANCES["bf16"].loss, TOLERANCES["bf16"].grad_norm) * 2
    small, large = (weights_in_bf16(ranks, "bf16_stochastic", rate, num_seeds=1) for rate in (1e-3, 1e-2))
    assert all(figure <= limit for figure, limit in zip(small, limits, strict=True))
    assert large[2] > limits[2]
