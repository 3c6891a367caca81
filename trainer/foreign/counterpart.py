"""One row of a table of another tool's keys: what it is here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


class Kind(Enum):
    """How a key of another tool goes over; the words are those of the report and of the documentation."""

    RENAMED = "a key here"  # with the same values
    MAPPED = "a key here, with other values"
    NONE = "no counterpart"
    SAME = "already so"  # as long as the key has one of its defaults
    LAUNCHER = "decided by the launcher"


@dataclass(frozen=True)
class Counterpart:
    """The key that does the same here; or none, and why."""

    key: str | None
    note: str = ""
    kind: Kind = Kind.MAPPED
    defaults: tuple[Any, ...] = ()  # what means the same to the tool as leaving the key out, its default first

    def is_default(self, value: object) -> bool:
        """Whether the tool takes this value also where the key is not written."""
        return any(
            value == default and isinstance(value, bool) == isinstance(default, bool) for default in self.defaults
        )

    def __str__(self) -> str:
        if self.key is None:
            return f"has no counterpart here: {self.note}"
        return f"is `{self.key}` here" + (f" ({self.note})" if self.note else "")


def renamed(key: str, *defaults: object, note: str = "") -> Counterpart:
    """A key whose value goes over as it is."""
    return Counterpart(key, note, Kind.RENAMED, defaults)


def mapped(key: str, *defaults: object, note: str = "") -> Counterpart:
    """A key whose value is another one here, or says it together with other keys."""
    return Counterpart(key, note, Kind.MAPPED, defaults)


def none(why: str, *defaults: object) -> Counterpart:
    """A key that nothing here stands for."""
    return Counterpart(None, why, Kind.NONE, defaults)


def same(why: str, *defaults: object) -> Counterpart:
    """A key whose defaults are what always happens here."""
    return Counterpart(None, why, Kind.SAME, defaults)


def launcher(why: str, *defaults: object) -> Counterpart:
    """A key about ranks and machines, which no recipe holds."""
    return Counterpart(None, why, Kind.LAUNCHER, defaults)


def alike(row: Counterpart, *spellings: str) -> dict[str, Counterpart]:
    """The same row for several spellings."""
    return dict.fromkeys(spellings, row)
