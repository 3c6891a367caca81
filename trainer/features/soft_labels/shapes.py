"""The columns of soft labels, for `trainer init`."""

from __future__ import annotations

from collections.abc import Iterator
from math import isclose
from typing import Any

from trainer.features import Columns

_MOST_APART = 1e-3  # of the sum of the probabilities of a row from 1


def of_probabilities(columns: Columns) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the section `task` of a text and the probabilities of its classes, and the reason for it."""
    for column in columns.all if columns.label is None else []:
        rows = _rows(column)
        texts = [one for one in columns.texts if one is not column]
        if not rows or not texts or not all(row.keys() == rows[0].keys() and _are_probabilities(row) for row in rows):
            continue
        if all(value in (0, 1) for row in rows for value in row.values()):
            continue  # marks of classes
        text = columns.text or max(texts, key=lambda one: one.characters)
        keys = {"text": text.name, "probabilities": column.name, "labels": [str(name) for name in rows[0]]}
        yield {"type": "sequence_classification", **keys}, f"a probability of each class in `{column.name}`"
        return


def _rows(column: Any) -> list[dict[Any, Any]]:
    """Return the lists or objects of a column by place or by name; empty for other columns."""
    if column.kind == "numbers":
        return [dict(enumerate(values)) for values in column.values]
    return [*column.values] if all(isinstance(value, dict) for value in column.values) else []


def _are_probabilities(row: dict[Any, Any]) -> bool:
    values = [*row.values()]
    are_numbers = len(values) > 1 and all(isinstance(one, int | float) and 0 <= one <= 1 for one in values)
    return are_numbers and isclose(sum(values), 1, abs_tol=_MOST_APART)
