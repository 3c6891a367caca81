"""The columns of a data set: the kind and the distinct values of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

Kind = Literal[
    "text", "integer", "number", "boolean", "image", "texts", "numbers", "chat", "objects", "object", "empty"
]

_SCALARS: tuple[tuple[type, Kind], ...] = ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "text"))
_ITEMS: dict[Kind, Kind] = {"text": "texts", "integer": "numbers", "number": "numbers", "boolean": "numbers"}
IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
_ROLES, _CONTENTS = {"role", "from"}, {"content", "value"}


@dataclass(frozen=True)
class Column:
    """A column of the first rows.

    `values` are those that are not null; `names` are the classes that the data set declares, in order.
    """

    name: str
    kind: Kind
    values: Sequence[Any]
    names: Sequence[str] = ()

    @cached_property
    def distinct(self) -> list[Any]:
        """The distinct values of a column of scalars, sorted; empty for other columns."""
        return sorted(set(self.values)) if self.kind in ("text", "integer", "number", "boolean") else []

    @property
    def repeats(self) -> bool:
        """Whether most values stand in several rows; of a few rows, whether one does."""
        return len(self.distinct) <= max(len(self.values) / 2, min(len(self.values) - 1, 10))

    @cached_property
    def characters(self) -> float:
        """The mean length of texts; 0 for other columns."""
        return sum(map(len, self.values)) / max(len(self.values), 1) if self.kind == "text" else 0.0

    @property
    def shown(self) -> str:
        """The name and the kind, for messages."""
        classes = f"{len(self.names)} classes" if self.names else self.kind
        distinct = f", {len(self.distinct):,} distinct" if self.distinct and not self.names else ""
        return f"{self.name} ({classes}{distinct})"


def columns_of(rows: Any, most: int) -> list[Column]:
    """Return the columns of the first rows of a `datasets.Dataset`."""
    images = [name for name, feature in rows.features.items() if type(feature).__name__ == "Image"]
    read = rows.remove_columns(images)[:most]  # all columns at once, because each selection copies all features
    found = []
    for name, feature in rows.features.items():
        declared = tuple(getattr(feature, "names", None) or ())
        values = [value for value in read.get(name, ()) if value is not None]
        if values and len(values) < most and all(isinstance(value, float) and value.is_integer() for value in values):
            values = list(map(int, values))  # integers beside empty cells
        found.append(Column(name, _kind(values) if name in read else "image", values, declared))
    return found


def _kind(values: Sequence[Any]) -> Kind:
    kinds = {_kind_of(value) for value in values}
    if kinds <= {"integer", "number", "boolean"} and len(kinds) > 1:
        return "number"
    if len(kinds - {"empty"}) != 1:
        return "empty" if not kinds - {"empty"} else "object"
    kind = (kinds - {"empty"}).pop()
    return "image" if kind == "text" and all(map(_names_image, values)) else kind


def _names_image(text: str) -> bool:
    """Return whether a text names an image file; an address names none."""
    return text.lower().endswith(IMAGE_ENDINGS) and "://" not in text


def _kind_of(value: Any) -> Kind:
    if isinstance(value, list):
        inner = value[0] if value else None
        if isinstance(inner, dict):
            return "chat" if inner.keys() & _ROLES and inner.keys() & _CONTENTS else "objects"
        return "empty" if inner is None else _ITEMS.get(_kind_of(inner), "image" if _is_picture(inner) else "objects")
    if isinstance(value, dict):
        return "image" if isinstance(value.get("bytes"), bytes) else "object"
    if isinstance(value, bytes):
        return "image"
    return next((kind for scalar, kind in _SCALARS if isinstance(value, scalar)), "object")


def _is_picture(rows: Any) -> bool:
    """Return whether nested lists hold numbers, as `[height][width]` or `[height][width][channels]`."""
    while isinstance(rows, list) and rows:
        rows = rows[0]
    return isinstance(rows, int | float) and not isinstance(rows, bool)
