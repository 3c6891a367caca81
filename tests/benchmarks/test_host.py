"""The host's time of each strategy, measured in small."""

from __future__ import annotations

import pytest

from tests.benchmarks.host import OURS, PLAIN, compete, profile
from tests.helpers.ranks import RankPools


@pytest.mark.nightly
def test_each_strategy_has_its_time(ranks: RankPools):
    found = ranks(2).run(compete, (*PLAIN, *OURS), 2, "bf16", 2, 1, {})[0]
    assert found.keys() == {*PLAIN, *OURS}
    assert all(len(numbers) == 2 and min(numbers) > 0 for numbers in found.values())


@pytest.mark.nightly
def test_a_profile_names_functions(ranks: RankPools):
    assert "begin_step" in ranks(2).run(profile, "zero3", 2, "fp32", 1, 40, {})[0]
