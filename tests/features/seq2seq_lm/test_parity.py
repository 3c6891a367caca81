"""Parity of sequence-to-sequence language modelling: the same training under every layout as on one process."""

from __future__ import annotations

import pytest

from tests.helpers.ranks import RankPools
from tests.parity.test_tasks import (
    LAYOUTS,
    assert_accumulation_changes_nothing,
    assert_layout_is_one_process,
    marks_of,
)

QUICK = {"seq2seq_lm": ("pipeline",)}
FURTHER = {"seq2seq_lm": ("tensor-sequence-accumulated",), "seq2seq_lm_bart": ("fsdp-accumulated",)}


@pytest.mark.parametrize("task", ["seq2seq_lm", pytest.param("seq2seq_lm_bart", marks=pytest.mark.slow)])
def test_accumulation_on_one_process_changes_nothing(task: str):
    assert_accumulation_changes_nothing(task)


@pytest.mark.parametrize(
    ("task", "layout"),
    [
        pytest.param(task, name, marks=marks_of(name, QUICK.get(task, ()), FURTHER[task]))
        for task in FURTHER
        for name in LAYOUTS
        if name not in ("context", "ring", "tensor-context")  # T5 and BART have no context parallelism
    ],
)
def test_any_layout_is_one_process(ranks: RankPools, task: str, layout: str):
    assert_layout_is_one_process(ranks, task, layout)
