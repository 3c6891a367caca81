"""Files of recipes as trees: JSON, or YAML by the ending."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.base.errors import RecipeError
from trainer.recipe.reading.parser import Node, Origin, Problem, parse

if TYPE_CHECKING:
    from trainer.recipe.reading.yaml_parser import Scalar

MAX_BYTES = 1_000_000
YAML_ENDINGS = (".yaml", ".yml")
ENDINGS = (".json", *YAML_ENDINGS)
"""Endings of recipes."""
RECIPE_FILE = "trainer_recipe.json"
"""The name of the recipe in an exported folder."""


def read_file(path: Path, scalar: Scalar | None = None) -> tuple[Node, list[Problem]]:
    """Return the tree of a file, and the problems after which parsing could continue.

    Args:
        scalar: returns the value of a scalar of YAML; None: that of YAML 1.2.

    Raises:
        RecipeError: the file cannot be read, or is neither JSON nor, with an ending of `YAML_ENDINGS`, YAML.
    """
    if is_yaml(path):
        from trainer.recipe.reading.yaml_parser import core_scalar, parse_yaml

        return parse_yaml(read_text(path), _file_origin(path), scalar or core_scalar)
    return parse(read_text(path), _file_origin(path))


def is_yaml(path: Path) -> bool:
    return path.suffix.lower() in YAML_ENDINGS


def shown_path(path: Path) -> str:
    """Return the path for messages: relative to the current folder if it is inside, and in printable characters."""
    shown = Path(os.path.abspath(path))
    with suppress(ValueError, OSError):  # outside, or the current folder was removed
        shown = shown.relative_to(Path.cwd())
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in str(shown))


def _file_origin(path: Path) -> Origin:
    return Origin(shown_path(path), folder=Path(os.path.abspath(path)).parent)


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
