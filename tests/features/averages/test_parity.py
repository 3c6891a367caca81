"""Averages of the weights under every layout."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.ranks import RankPools
from tests.parity.test_learning import UNFROZEN, assert_any_layout_is_one_process

EMA = {"training": {"ema_decay": 0.7}}
SECTIONS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": {"name": "sgd", "learning_rate": 0.1}, **EMA},
    "adafactor": {"optimizer": {"name": "adafactor"}, **EMA},
    "unfrozen": {**UNFROZEN, **EMA},
}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("sgd", "fsdp-accumulated"),
        *(pytest.param("sgd", layout, marks=pytest.mark.slow) for layout in ("zero2-accumulated", "pipeline")),
        pytest.param("adafactor", "fsdp-accumulated", marks=pytest.mark.slow),
        *(pytest.param("unfrozen", layout, marks=pytest.mark.slow) for layout in ("fsdp-accumulated", "pipeline")),
        *(
            pytest.param("sgd", layout, marks=pytest.mark.nightly)
            for layout in ("zero1", "tensor-sequence-accumulated")
        ),
    ],
)
def test_any_layout_is_one_process(ranks: RankPools, name: str, layout: str):
    assert_any_layout_is_one_process(ranks, layout, SECTIONS[name])
