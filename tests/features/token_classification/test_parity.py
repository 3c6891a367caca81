"""Parity of token classification: the same training under every layout as on one process."""

from __future__ import annotations

import pytest

from tests.helpers.ranks import RankPools
from tests.parity.test_padding_free import assert_equal_without_padding
from tests.parity.test_tasks import (
    LAYOUTS,
    assert_accumulation_changes_nothing,
    assert_layout_is_one_process,
    marks_of,
)

TASK = "token_classification"


def test_accumulation_on_one_process_changes_nothing():
    assert_accumulation_changes_nothing(TASK)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=marks_of(name, (), ("fsdp-accumulated", "tensor-sequence-accumulated", "context")))
        for name in LAYOUTS
    ],
)
def test_any_layout_is_one_process(ranks: RankPools, layout: str):
    assert_layout_is_one_process(ranks, TASK, layout)


def test_rows_without_padding():
    assert_equal_without_padding(TASK)
