"""Rows of the tables of other tools' keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from trainer.recipe.foreign.values import Value


class Kind(Enum):
    """Conversion of a key; the report and the documentation show the values."""

    RENAMED = "a key with the same values"
    MAPPED = "a key with other values"
    NONE = "no counterpart"
    SAME = "same behaviour"  # if the value is one of the defaults
    LAUNCHER = "set by the launcher"
    REFUSED = "no counterpart, and decides the training: the file is refused"


@dataclass(frozen=True)
class Counterpart:
    """The key of a recipe for a key of another tool; or none, and the reason."""

    key: str | None
    note: str
    kind: Kind
    defaults: tuple[Any, ...]  # values with the same effect as leaving the key out; the tool's default is first
    value: Value | None = None  # None: the value is the same, or depends on several keys

    def is_default(self, value: object) -> bool:
        """Return whether the value has the same effect as leaving the key out."""
        return any(
            value == default and isinstance(value, bool) == isinstance(default, bool) for default in self.defaults
        )

    def __str__(self) -> str:
        if self.key is None:
            return f"has no counterpart here: {self.note}"
        return f"is `{self.key}` here" + (f" ({self.note})" if self.note else "")


def _with_key(kind: Kind, key: str, *defaults: object, note: str = "", value: Value | None = None) -> Counterpart:
    return Counterpart(key, note, kind, defaults, value)


def _without_key(kind: Kind, why: str, *defaults: object) -> Counterpart:
    return Counterpart(None, why, kind, defaults)


renamed, mapped = (partial(_with_key, kind) for kind in (Kind.RENAMED, Kind.MAPPED))
"""The rows of keys with the same values; and of keys with other values, or with one that depends on several keys."""

none, refused, same, launcher = (
    partial(_without_key, kind) for kind in (Kind.NONE, Kind.REFUSED, Kind.SAME, Kind.LAUNCHER)
)
"""The rows of keys without a counterpart: those without effect here; those that decide what is learned; those whose
defaults are the fixed behaviour of the trainer; those of ranks and machines, which the launcher sets."""


def alike(row: Counterpart, spellings: str) -> dict[str, Counterpart]:
    """Return the same row for several spellings, which are separated by spaces."""
    return dict.fromkeys(spellings.split(), row)


def prefixed(prefix: str, rows: Mapping[str, Counterpart]) -> dict[str, Counterpart]:
    return {f"{prefix}{name}": row for name, row in rows.items()}
