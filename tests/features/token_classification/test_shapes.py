from __future__ import annotations

from typing import Any

import datasets
import pytest

from tests.tools.init.test_shapes import rows_of
from trainer.tools.init.columns import columns_of
from trainer.tools.init.shapes import shapes


@pytest.mark.parametrize(
    ("rows", "task"),
    [
        (rows_of(3, tokens=["a", "b"], ner_tags=["O", "B-X"]), {"words": "tokens", "tags": "ner_tags"}),
        (rows_of(3, text="t", spans=[{"start": 0, "end": 1, "label": "A"}]), {"text": "text", "spans": "spans"}),
    ],
)
def test_tagged_words_and_spans_are_proposed_first(rows: list[dict[str, Any]], task: dict[str, Any]) -> None:
    found = shapes(columns_of(datasets.Dataset.from_list(rows), 10_000))
    assert found[0].task.items() >= task.items()
