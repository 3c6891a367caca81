"""Noise on embeddings under every layout."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.ranks import RankPools
from tests.helpers.training import TINY_TASKS
from tests.parity.test_learning import assert_any_layout_is_one_process


def sections_of(task: str) -> dict[str, Any]:
    tiny = TINY_TASKS[task]
    return {"task": tiny.keys, "model": {**tiny.model, "neftune_alpha": 5}}


@pytest.mark.parametrize(
    ("task", "layout"),
    [
        ("causal_lm", "pipeline"),
        *(
            pytest.param("causal_lm", layout, marks=pytest.mark.slow)
            for layout in ("zero3", "tensor-sequence-accumulated", "context")
        ),
        pytest.param("causal_lm_packed", "zero2-accumulated", marks=pytest.mark.slow),
        pytest.param("causal_lm", "fsdp-accumulated", marks=pytest.mark.nightly),
    ],
)
def test_any_layout_is_one_process(ranks: RankPools, task: str, layout: str):
    assert_any_layout_is_one_process(ranks, layout, sections_of(task))
