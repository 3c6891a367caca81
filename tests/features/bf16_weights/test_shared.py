"""Weights in bf16 in the shared tests of optimizers: resumed trainings, and late reads of bad steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.optimizers.test_skipping import (
    assert_late_reads_change_nothing,
    assert_late_reads_change_nothing_on_two_ranks,
)
from tests.helpers.ranks import RankPools
from tests.helpers.training import tiny_recipe
from tests.parity.test_resuming import assert_goes_on_bit_for_bit

METHODS = ("bf16_compensated", "bf16_stochastic")


@pytest.mark.parametrize("weights", METHODS)
@pytest.mark.slow
def test_they_go_on_bit_for_bit(ranks: RankPools, tmp_path: Path, weights: str):
    keys: dict[str, Any] = {"precision": "bf16", "weights": weights, "parallel": {"strategy": "fsdp", "tensor": 1}}
    assert_goes_on_bit_for_bit(ranks, tmp_path, tiny_recipe(model={"dropout": 0.1}, **keys))


@pytest.mark.parametrize("weights", [METHODS[0], pytest.param(METHODS[1], marks=pytest.mark.nightly)])
def test_late_reads_give_the_steps_of_a_waiting_host(weights: str):
    assert_late_reads_change_nothing(precision="bf16", weights=weights)


@pytest.mark.nightly
def test_late_reads_on_two_ranks(ranks: RankPools):
    sections = {"precision": "bf16", "weights": METHODS[0], "parallel": {"tensor": 2}}
    assert_late_reads_change_nothing_on_two_ranks(ranks, **sections)
