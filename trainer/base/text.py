"""Text helpers: lists that messages show in part, and nested values by their dotted keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def listed(values: Sequence[object], most: int) -> str:
    """Return the first `most` values, separated by commas, and the number of those left out: "1, 2 and 3 more"."""
    shown = ", ".join(map(str, values[:most]))
    return f"{shown} and {len(values) - most} more" if len(values) > most else shown


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Iterate over the values of nested mappings with the keys that lead to them.

    Lists and empty mappings count as values.
    """
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    else:
        yield path, value


def dotted_leaves(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of nested mappings by their dotted keys, "training.epochs", without empty mappings."""
    return {".".join(path): leaf for path, leaf in leaves(value) if not isinstance(leaf, Mapping)}
