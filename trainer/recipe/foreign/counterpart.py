"""Rows of the tables of other tools' keys."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from trainer.recipe.foreign.values import Value


class Kind(Enum):
    """Conversion of a key; the report and the documentation show the values. Rows of the tables have the names."""

    RENAMED = "a key with the same values"
    MAPPED = "a key with other values"  # or with one that depends on several keys
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
