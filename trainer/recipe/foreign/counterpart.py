"""Rows of the tables of other tools' keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


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
    note: str = ""
    kind: Kind = Kind.MAPPED
    defaults: tuple[Any, ...] = ()  # values with the same effect as leaving the key out; the tool's default is first

    def is_default(self, value: object) -> bool:
        """Return whether the value has the same effect as leaving the key out."""
        return any(
            value == default and isinstance(value, bool) == isinstance(default, bool) for default in self.defaults
        )

    def __str__(self) -> str:
        if self.key is None:
            return f"has no counterpart here: {self.note}"
        return f"is `{self.key}` here" + (f" ({self.note})" if self.note else "")


def renamed(key: str, *defaults: object, note: str = "") -> Counterpart:
    """Return the row of a key with the same values."""
    return Counterpart(key, note, Kind.RENAMED, defaults)


def mapped(key: str, *defaults: object, note: str = "") -> Counterpart:
    """Return the row of a key with other values, or with a value that depends on several keys."""
    return Counterpart(key, note, Kind.MAPPED, defaults)


def none(why: str, *defaults: object) -> Counterpart:
    """Return the row of a key without a counterpart."""
    return Counterpart(None, why, Kind.NONE, defaults)


def refused(why: str, *defaults: object) -> Counterpart:
    """Return the row of a key without a counterpart that decides what is learned."""
    return Counterpart(None, why, Kind.REFUSED, defaults)


def same(why: str, *defaults: object) -> Counterpart:
    """Return the row of a key whose defaults are the fixed behaviour of the trainer."""
    return Counterpart(None, why, Kind.SAME, defaults)


def launcher(why: str, *defaults: object) -> Counterpart:
    """Return the row of a key for ranks and machines, which the launcher sets."""
    return Counterpart(None, why, Kind.LAUNCHER, defaults)


def alike(row: Counterpart, *spellings: str) -> dict[str, Counterpart]:
    """Return the same row for several spellings."""
    return dict.fromkeys(spellings, row)


def prefixed(prefix: str, rows: Mapping[str, Counterpart]) -> dict[str, Counterpart]:
    return {f"{prefix}{name}": row for name, row in rows.items()}
