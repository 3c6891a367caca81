"""fp16 in the shared tests of optimizers: late reads of bad steps."""

from __future__ import annotations

from tests.engine.optimizers.test_skipping import (
    assert_late_reads_change_nothing,
    assert_late_reads_change_nothing_on_two_ranks,
)
from tests.helpers.ranks import RankPools


def test_late_reads_give_the_steps_of_a_waiting_host():
    assert_late_reads_change_nothing(precision="fp16")


def test_late_reads_of_two_stages(ranks: RankPools):
    assert_late_reads_change_nothing_on_two_ranks(ranks, precision="fp16", parallel={"pipeline": {"stages": 2}})
