"""StableAdamW in the shared tests of optimizers: layouts, resumed trainings, and late reads of bad steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.optimizers.test_skipping import (
    assert_late_reads_change_nothing,
    assert_late_reads_change_nothing_on_two_ranks,
)
from tests.helpers.ranks import RankPools
from tests.helpers.training import parallel_keys
from tests.parity.test_learning import assert_any_layout_is_one_process, of_optimizer
from tests.parity.test_resuming import assert_resumes_in_another_layout

STABLE = {"optimizer": {"name": "stable_adamw"}}


@pytest.mark.slow
def test_any_layout_is_one_process(ranks: RankPools):
    assert_any_layout_is_one_process(ranks, "tensor-sequence-accumulated", of_optimizer("stable_adamw"))


@pytest.mark.slow
def test_it_resumes_in_another_layout(ranks: RankPools, tmp_path: Path):
    optimizer = {"name": "stable_adamw", "learning_rate": 1e-3, "weight_decay": 0.01}
    sections = {"model": {"dropout": 0.1}, "optimizer": optimizer, "schedule": {"name": "constant"}}
    assert_resumes_in_another_layout(ranks, tmp_path, **sections)


def test_late_reads_give_the_steps_of_a_waiting_host():
    assert_late_reads_change_nothing(**STABLE)


@pytest.mark.nightly
def test_late_reads_on_two_ranks(ranks: RankPools):
    assert_late_reads_change_nothing_on_two_ranks(ranks, **STABLE, parallel=parallel_keys("fsdp", 2))
