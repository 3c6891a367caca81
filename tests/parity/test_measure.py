"""The table that the README shows."""

from __future__ import annotations

import pytest

from tests.helpers.ranks import RankPools
from tests.parity.measure import HEADER, Measured

BF16_EPSILON = 2**-7
BOUNDS = (1e-5, 1e-4, BF16_EPSILON, 4 * BF16_EPSILON, 1e-5, 1e-11)  # the promise, column by column


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_table_is_within_the_promise(ranks: RankPools):
    assert HEADER.splitlines()[0].count("|") == len(BOUNDS) + 2
    measured = Measured(ranks)
    cells = measured.differences(2, 2)
    assert all(cell <= bound for cell, bound in zip(cells, BOUNDS, strict=True)), cells
    torchs_own = measured.differences(2, 6, layout_invariant_dropout=False)
    assert all(cell > bound for cell, bound in zip(torchs_own, BOUNDS, strict=True)), "the table would show a failure"
