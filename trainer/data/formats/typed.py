"""The types of columns that files hold as texts, such as those of CSV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from trainer.data.formats.base import CellKind

if TYPE_CHECKING:
    import pyarrow
    from datasets import Dataset

_CELLS_LOOKED_AT = 1000
_INTEGER = "[+-]?(0|[1-9][0-9]*)"
_NUMBER = r"[+-]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?"
_TYPES: Mapping[CellKind | None, Mapping[str, str]] = {
    None: {"bool": "true|True|TRUE|false|False|FALSE", "int64": _INTEGER, "uint64": _INTEGER, "float64": _NUMBER},
    "class": {"int64": "0|-?[1-9][0-9]*", "float64": r"(0|-?[1-9][0-9]{0,14})(\.0)?"},
    "text": {},
}
"""The types of columns, and the form of all their cells. Numbers have no leading zeros, which are lost in a number;
classes have no sign and no zero at the end either. But classes 1 and 1.0 are the same."""


def with_types(parts: Sequence[Dataset], kinds: Mapping[str, CellKind]) -> list[Dataset]:
    """Return rows with numbers and booleans in columns of these alone; a column has one type in all parts.

    Args:
        parts: rows as texts; values of other types stay.
        kinds: the kinds of columns that a task or a map reads.
    """
    import pyarrow

    types: dict[str, dict[str, pyarrow.ChunkedArray]] = {name: {} for part in parts for name in part.column_names}
    tables: list[dict[str, pyarrow.ChunkedArray]] = [{} for _ in parts]
    for name in types:
        places = [place for place, part in enumerate(parts) if name in part.column_names]
        columns = [parts[place].data.column(name) for place in places]
        # All parts together, so that a column has one type in training and validation rows.
        texts = pyarrow.chunked_array([chunk for column in columns for chunk in column.chunks])
        typed = _typed(texts, kinds.get(name)) if "string" in str(texts.type) else None
        start = 0
        for place, column in zip(places, columns, strict=True):
            if typed is not None:
                tables[place][name] = typed.slice(start, len(column))
            start += len(column)
    return [_with_columns(part, columns) for part, columns in zip(parts, tables, strict=True)]


def _typed(texts: pyarrow.ChunkedArray, kind: CellKind | None) -> pyarrow.ChunkedArray | None:
    """Return a column as that of the first type with the form of all its texts; None: it stays one of texts."""
    import pyarrow
    import pyarrow.compute as pc

    def fits(cells: pyarrow.ChunkedArray, form: str) -> bool | None:
        """Return whether all cells have a form; None: all are empty."""
        fit: bool | None = pc.all(pc.match_substring_regex(cells, rf"^\s*({form})\s*$")).as_py()
        return fit

    # The first cells refuse most types at little cost.
    first = texts.slice(0, _CELLS_LOOKED_AT)
    for name, form in _TYPES[kind].items():
        if fits(first, form) is False or not fits(texts, form):
            continue
        # Arrow reads no sign "+".
        plain = pc.utf8_ltrim(pc.utf8_trim_whitespace(texts), "+")
        try:
            return pc.equal(pc.utf8_lower(plain), "true") if name == "bool" else pc.cast(plain, name)
        except pyarrow.ArrowInvalid:  # the number is too large
            continue
    return None


def _with_columns(rows: Dataset, columns: Mapping[str, pyarrow.ChunkedArray]) -> Dataset:
    """Return rows with other values in some columns."""
    import datasets
    import pyarrow

    if not columns:
        return rows
    names = rows.column_names
    parts = [datasets.Dataset(pyarrow.table(dict(columns)))]
    if others := [name for name in names if name not in columns]:
        parts.append(rows.select_columns(others))
    return datasets.concatenate_datasets(parts, axis=1).select_columns(names)
