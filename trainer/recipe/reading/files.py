"""Files of recipes as trees: JSON, or a registered format by the ending."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.base.errors import RecipeError
from trainer.base.extensions import resolved, rows_of
from trainer.recipe.reading.parser import Node, Origin, Problem, parse

MAX_BYTES = 1_000_000
RECIPE_FILE = "trainer_recipe.json"
"""The name of the recipe in an exported folder."""

Scalar = Callable[[Any], bool | int | float | str | None]
"""A function that returns the value of a scalar, a node of the parser of a format, or raises `ValueError`."""


@dataclass(frozen=True)
class RecipeFormat:
    """A format of recipes beside JSON, as a row of `extension.json` by the ending of its files.

    Attributes:
        parse: The text "module:name" of its parser: as `parse`, from a text, its origin and a `Scalar` or None.
        write: The text "module:name" of its writer: from values, comments by dotted keys, and a title, to a text.
    """

    parse: str
    write: str


def recipe_formats() -> dict[str, RecipeFormat]:
    """Return the formats of recipes beside JSON by their endings."""
    return rows_of("recipe_format", RecipeFormat)


def recipe_endings() -> tuple[str, ...]:
    """Return the endings of recipes, in small letters."""
    return ".json", *recipe_formats()


def read_file(path: Path, scalar: Scalar | None = None) -> tuple[Node, list[Problem]]:
    """Return the tree of a file, and the problems after which parsing could continue.

    Args:
        scalar: returns the values of scalars in formats other than JSON; None: those of a recipe.

    Raises:
        RecipeError: the file cannot be read, or is not in the format of its ending (JSON, if none is registered).
    """
    text, ending = read_text(path), path.suffix.lower()
    origin = Origin(shown_path(path), folder=Path(os.path.abspath(path)).parent)
    if row := recipe_formats().get(ending):
        tree: tuple[Node, list[Problem]] = resolved(row.parse)(text, origin, scalar)
        return tree
    try:
        return parse(text, origin)
    except RecipeError as error:
        if ending in ("", ".json"):
            raise
        known = " or ".join(recipe_endings())
        hint = f"a file with the ending {ending} is read as JSON; recipes end with {known}"
        raise RecipeError(f"{error}; {hint}") from error


def shown_path(path: Path) -> str:
    """Return the path for messages: relative to the current folder if it is inside, and in printable characters."""
    shown = Path(os.path.abspath(path))
    with suppress(ValueError, OSError):  # outside, or the current folder was removed
        shown = shown.relative_to(Path.cwd())
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in str(shown))


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        RecipeError: the file cannot be read, is too large, or is not UTF-8.
    """
    try:
        return _text(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise RecipeError(f"{shown_path(path)}: cannot be read: {reason}") from error


def _text(path: Path) -> str:
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise ValueError("it is a folder")
    if not stat.S_ISREG(mode):  # a pipe can block, and only one rank could read it
        raise ValueError("it is not a regular file")
    with path.open("rb") as file:
        # One byte beyond the limit shows that a file is too large, without a read of all of it.
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"it is larger than the limit of {MAX_BYTES // 1_000_000} MB")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
