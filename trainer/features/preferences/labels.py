"""The labels of KTO: the values that are read, and the map of others."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.base.errors import DataError
from trainer.tasks.text.columns import cell

_LABELS: Mapping[float | str, int] = {
    **{1: 1, "true": 1, "1": 1, "1.0": 1, "yes": 1, "desirable": 1},
    **{0: 0, "false": 0, "0": 0, "0.0": 0, "no": 0, "undesirable": 0},
}
"""The labels of kto, as JSON and tables hold them; true and 1.0 are equal to 1."""
_OPPOSITES = (
    ("good", "bad"), ("positive", "negative"), ("accepted", "rejected"), ("chosen", "rejected"), ("like", "dislike"),
    ("liked", "disliked"), ("up", "down"), ("thumbs_up", "thumbs_down"), ("thumbs up", "thumbs down"),
    ("correct", "incorrect"), ("pass", "fail"), ("1", "-1"), ("+1", "-1"),
)  # fmt: skip


def are_labels(values: Sequence[Any]) -> bool:
    """Return whether values are labels that are read as they are, or have opposites that a map reads."""
    return bool(values) and (all(_is_label(value) for value in values) or opposites(values) is not None)


def opposites(values: Sequence[Any]) -> dict[str, bool] | None:
    """Return which of two values, such as "good" and "bad", is true, as `data.map` reads them; None: it is unclear."""
    texts = {str(_plain(value)): str(value) for value in values}
    for good, bad in _OPPOSITES:
        if texts.keys() == {good, bad}:
            return {texts[good]: True, texts[bad]: False}
    return None


def desirable(values: Sequence[Any], columns: Sequence[str], where: str, first_row: int) -> list[int]:
    """Return 1 for each label of a desirable answer, and 0 for others.

    Args:
        columns: those of the task; the last one holds the labels.

    Raises:
        DataError: a value is no label.
    """
    column = columns[-1]
    for place, value in enumerate(values):
        if not _is_label(value):
            others = list(dict.fromkeys(str(one) for one in values if not _is_label(one)))[:2]
            others = others if len(others) == 2 else [others[0], "..."]
            table = opposites(values) or {others[0]: True, others[1]: False}
            made = {**{name: name for name in columns}, column: {"column": column, "values": table}}
            known = "true, false, 1, 0, yes, no, desirable or undesirable"
            raise DataError(
                f"{cell(column, first_row + place, where)} must be {known}, but is {value!r}; correct it, or set"
                f" `data.map.columns` to {json.dumps(made, ensure_ascii=False)}, with true for desirable answers"
            )
    return [_LABELS[_plain(value)] for value in values]


def _is_label(value: Any) -> bool:
    return isinstance(value, bool | int | float | str) and _plain(value) in _LABELS


def _plain(value: float | str) -> float | str:
    return value.strip().lower() if isinstance(value, str) else value
