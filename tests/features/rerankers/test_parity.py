"""Parity of rerankers: the same training under every layout as on one process."""

from __future__ import annotations

import pytest

from tests.helpers.ranks import RankPools
from tests.parity.test_tasks import (
    CUTS,
    LAYOUTS,
    assert_accumulation_changes_nothing,
    assert_layout_is_one_process,
    marks_of,
)

VARIANTS = ("reranker_pairs",)
FURTHER = {"reranker": (CUTS[0], "context"), "reranker_pairs": CUTS[:1]}


@pytest.mark.parametrize(
    "task", [pytest.param(task, marks=pytest.mark.slow if task in VARIANTS else ()) for task in FURTHER]
)
def test_accumulation_on_one_process_changes_nothing(task: str):
    assert_accumulation_changes_nothing(task)


@pytest.mark.parametrize(
    ("task", "layout"),
    [pytest.param(task, name, marks=marks_of(name, (), FURTHER[task])) for task in FURTHER for name in LAYOUTS],
)
def test_any_layout_is_one_process(ranks: RankPools, task: str, layout: str):
    assert_layout_is_one_process(ranks, task, layout)
