"""Parity of embeddings: the same training under every layout as on one process."""

from __future__ import annotations

import pytest

from tests.helpers.ranks import RankPools
from tests.parity.test_padding_free import assert_equal_without_padding
from tests.parity.test_tasks import (
    CUTS,
    LAYOUTS,
    assert_accumulation_changes_nothing,
    assert_layout_is_one_process,
    marks_of,
)

QUICK = {"embedding": ("fsdp-accumulated",)}
FURTHER = {
    "embedding": (*CUTS, "zero3-tensor"),
    "embedding_duplicates": CUTS[:1],
    "sparse_embedding": ("fsdp-accumulated", "tensor-sequence-accumulated"),
    "multi_vector_embedding": ("fsdp-accumulated", "pipeline"),
    "multi_vector_taught": (),
}


@pytest.mark.parametrize(
    "task", ["embedding", *(pytest.param(task, marks=pytest.mark.slow) for task in FURTHER if task != "embedding")]
)
def test_accumulation_on_one_process_changes_nothing(task: str):
    assert_accumulation_changes_nothing(task)


@pytest.mark.parametrize(
    ("task", "layout"),
    [
        pytest.param(task, name, marks=marks_of(name, QUICK.get(task, ()), FURTHER[task]))
        for task in FURTHER
        for name in LAYOUTS
    ],
)
def test_any_layout_is_one_process(ranks: RankPools, task: str, layout: str):
    assert_layout_is_one_process(ranks, task, layout)


@pytest.mark.slow
def test_rows_without_padding():
    assert_equal_without_padding("embedding")
