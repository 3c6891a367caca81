from __future__ import annotations

from typing import Any

import datasets
import pytest

from tests.tools.init.test_shapes import CHAT, rows_of
from trainer.tools.init.columns import columns_of
from trainer.tools.init.shapes import shapes


@pytest.mark.parametrize(
    ("rows", "task"),
    [
        (rows_of(3, prompt="p", chosen="a", rejected="b"), {"type": "preference", "prompt": "prompt"}),
        (rows_of(3, chosen=CHAT, rejected=CHAT), {"type": "preference", "prompt": None}),
        (rows_of(3, prompt=("a",), chosen=CHAT, rejected=CHAT), {"type": "preference", "prompt": None}),
        (rows_of(3, prompt="other", chosen=CHAT, rejected=CHAT), {"type": "preference", "prompt": "prompt"}),
        (rows_of(3, prompt="p", completion="a", label=(True, False)), {"loss": {"type": "kto"}, "label": "label"}),
        (rows_of(3, prompt="p", completion="a", label=(0, 1)), {"loss": {"type": "kto"}}),
        (rows_of(3, prompt="p", completion="a", label=("desirable", "Undesirable")), {"loss": {"type": "kto"}}),
        (rows_of(3, prompt="p", completion="a", label=("joy", "anger")), {"type": "causal_lm"}),
        (rows_of(3, completion=CHAT, label=(True, False)), {"loss": {"type": "kto"}, "prompt": None}),
    ],
)
def test_columns_of_answers_propose_preferences_first(rows: list[dict[str, Any]], task: dict[str, Any]) -> None:
    found = shapes(columns_of(datasets.Dataset.from_list(rows), 10_000))
    assert found[0].task.items() >= task.items()


def test_good_and_bad_are_mapped() -> None:
    rows = rows_of(4, prompt="p", completion="a", label=("Good", "bad"))
    found = shapes(columns_of(datasets.Dataset.from_list(rows), 10))[0]
    assert found.columns is not None
    assert found.columns["label"] == {"column": "label", "values": {"Good": True, "bad": False}}
