from __future__ import annotations

from typing import Any

import datasets
import pytest

from tests.tools.init.test_shapes import rows_of
from trainer.tools.init.columns import columns_of
from trainer.tools.init.shapes import shapes


@pytest.mark.parametrize(
    ("rows", "column"),
    [
        (rows_of(3, pixels=[[0, 1], [2, 3]], label=(0, 1)), "pixels"),
        (rows_of(3, file=("a/1.PNG", "2.jpg"), label=("a", "b")), "file"),
    ],
)
def test_columns_of_images_propose_their_classification_first(rows: list[dict[str, Any]], column: str) -> None:
    found = shapes(columns_of(datasets.Dataset.from_list(rows), 10_000))
    assert found[0].task.items() >= {"type": "image_classification", "image": column}.items()
