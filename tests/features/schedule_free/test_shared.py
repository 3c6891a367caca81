"""Schedule-free AdamW in the shared tests of optimizers: layouts, resumed trainings, and late reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.optimizers.test_skipping import (
    assert_late_reads_change_nothing,
    assert_late_reads_change_nothing_on_two_ranks,
)
from tests.helpers.ranks import RankPools
from tests.helpers.training import parallel_keys, tiny_recipe
from tests.parity.test_learning import assert_any_layout_is_one_process, of_optimizer
from tests.parity.test_resuming import assert_goes_on_bit_for_bit, assert_resumes_in_another_layout

NAME = "schedule_free_adamw"
LATE: dict[str, Any] = {"optimizer": {"name": NAME}, "schedule": {"name": "constant"}}


@pytest.mark.parametrize(
    "layout",
    [pytest.param("pipeline", marks=pytest.mark.slow), pytest.param("zero2", marks=pytest.mark.nightly)],
)
def test_any_layout_is_one_process(ranks: RankPools, layout: str):
    assert_any_layout_is_one_process(ranks, layout, of_optimizer(NAME))


@pytest.mark.slow
def test_it_resumes_in_another_layout(ranks: RankPools, tmp_path: Path):
    optimizer = {"name": NAME, "learning_rate": 1e-3, "weight_decay": 0.01}
    sections = {"model": {"dropout": 0.1}, "optimizer": optimizer, "schedule": {"name": "constant"}}
    assert_resumes_in_another_layout(ranks, tmp_path, **sections)


@pytest.mark.parametrize(
    "strategy",
    [pytest.param("fsdp", marks=pytest.mark.slow), pytest.param("zero2", marks=pytest.mark.nightly)],
)
def test_it_goes_on_bit_for_bit(ranks: RankPools, tmp_path: Path, strategy: str):
    recipe = tiny_recipe(
        model={"dropout": 0.1},
        optimizer={"name": NAME, "learning_rate": 1e-2},
        schedule={"name": "constant"},
        parallel=parallel_keys(strategy, 2),
    )
    assert_goes_on_bit_for_bit(ranks, tmp_path, recipe)


def test_late_reads_give_the_steps_of_a_waiting_host():
    assert_late_reads_change_nothing(**LATE)


@pytest.mark.nightly
def test_late_reads_with_a_warm_up_in_fp16():
    sections = {**LATE, "schedule": {"name": "constant", "warmup": 3}}
    assert_late_reads_change_nothing(**sections, precision="fp16")


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param(parallel_keys("fsdp", 2), marks=pytest.mark.slow),
        pytest.param({"pipeline": {"stages": 2}}, marks=pytest.mark.nightly),
    ],
    ids=["fsdp", "stages"],
)
def test_late_reads_on_two_ranks(ranks: RankPools, parallel: dict[str, Any]):
    assert_late_reads_change_nothing_on_two_ranks(ranks, **LATE, parallel=parallel)
