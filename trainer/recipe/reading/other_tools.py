"""Keys and files of other tools in messages of errors. Registered modules know them; without these, there are none."""

from __future__ import annotations

from collections.abc import Set
from typing import Protocol

from trainer.recipe.registered import all_of


class Counterpart(Protocol):
    """The key of a recipe for a key of another tool; or None, and the reason in `note`.

    In a message, its `str` follows the key of the other tool.
    """

    key: str | None
    note: str


class OtherTools(Protocol):
    """A registered module."""

    def counterpart(self, path: str, tool: str = "") -> Counterpart | None:
        """Return the counterpart of a dotted key; None: it is unknown.

        Args:
            path: the path, which may begin with a section of a recipe, unless `tool` is given.
            tool: the name of the tool; empty: any tool.
        """

    def file_problem(self, keys: Set[str], file: str) -> str | None:
        """Return the problem of a file with these keys, which no recipe has; None: most of them are of no tool."""


def _modules() -> list[OtherTools]:
    return list(all_of("other_tools").values())


def counterpart(path: str, tool: str = "") -> Counterpart | None:
    """Return the first counterpart of a key; see `OtherTools`."""
    return next((row for module in _modules() if (row := module.counterpart(path, tool))), None)


def file_problem(keys: Set[str], file: str) -> str | None:
    """Return the first problem of a file; see `OtherTools`."""
    return next((words for module in _modules() if (words := module.file_problem(keys, file))), None)
