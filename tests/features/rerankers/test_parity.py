"""Parity of rerankers: the same training under every layout as on one process."""

from __future__ import annotations

import pytest

from tests.helpers.ranks import RankPools
from tests.helpers.training import train_tiny
from tests.parity.cases import FEW_ROWS, assert_same_curve
from tests.parity.test_tasks import CUTS, LAYOUTS, assert_same_training, marks_of, recipe_of, reference, train

QUICK = {"reranker": ("context",)}
VARIANTS = ("reranker_pairs",)
TASKS = (*QUICK, *VARIANTS)


@pytest.mark.parametrize(
    "task", [pytest.param(task, marks=pytest.mark.slow if task in VARIANTS else ()) for task in TASKS]
)
def test_accumulation_on_one_process_changes_nothing(task: str):
    found = train_tiny(recipe_of(task, training={"micro_batch_size": 5}), num_rows=FEW_ROWS)
    assert_same_curve(found, reference(task)[0])


@pytest.mark.parametrize(
    ("task", "layout"),
    [
        pytest.param(task, name, marks=marks_of(name, QUICK.get(task, ()), CUTS[:1]))
        for task in TASKS
        for name in LAYOUTS
    ],
)
def test_any_layout_is_one_process(ranks: RankPools, task: str, layout: str):
    world_size, keys = LAYOUTS[layout]
    for found in ranks(world_size).run(train, task, keys):
        assert_same_training(found, reference(task))
