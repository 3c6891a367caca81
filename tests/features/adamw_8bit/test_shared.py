"""AdamW with moments in 8 bits in the shared tests of optimizers: layouts, resumed trainings, and late reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.optimizers.test_skipping import (
    assert_late_reads_change_nothing,
    assert_late_reads_change_nothing_on_two_ranks,
)
from tests.helpers.ranks import RankPools
from tests.helpers.training import TINY_BERT, parallel_keys, tiny_recipe
from tests.parity.cases import WIDE
from tests.parity.test_learning import assert_any_layout_is_one_process, of_optimizer
from tests.parity.test_resuming import assert_goes_on_bit_for_bit, assert_resumes_in_another_layout

SECTIONS: dict[str, Any] = {
    "model": {"dropout": 0.1, "config": {**TINY_BERT, **WIDE["bert"]}},  # parameters whose moments have 8 bits
    "schedule": {"name": "constant"},
}


@pytest.mark.slow
def test_any_layout_is_one_process(ranks: RankPools):
    assert_any_layout_is_one_process(ranks, "fsdp-accumulated", of_optimizer("adamw_8bit"))


@pytest.mark.slow
def test_it_resumes_in_another_layout(ranks: RankPools, tmp_path: Path):
    optimizer = {"name": "adamw_8bit", "learning_rate": 1e-3, "weight_decay": 0.01}
    assert_resumes_in_another_layout(ranks, tmp_path, **SECTIONS, optimizer=optimizer)


@pytest.mark.slow
def test_it_goes_on_bit_for_bit(ranks: RankPools, tmp_path: Path):
    optimizer = {"name": "adamw_8bit", "learning_rate": 1e-2}
    recipe = tiny_recipe(**SECTIONS, optimizer=optimizer, parallel=parallel_keys("fsdp", 2))
    assert_goes_on_bit_for_bit(ranks, tmp_path, recipe)


def test_late_reads_give_the_steps_of_a_waiting_host():
    assert_late_reads_change_nothing(optimizer={"name": "adamw_8bit"})


@pytest.mark.slow
def test_late_reads_on_two_ranks(ranks: RankPools):
    sections = {"optimizer": {"name": "adamw_8bit"}, "parallel": parallel_keys("fsdp", 2)}
    assert_late_reads_change_nothing_on_two_ranks(ranks, **sections)
