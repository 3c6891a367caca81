"""Files that tools write for the user, and those of recipes: their endings, names and texts."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.base.disk import replace_text
from trainer.base.errors import UsageError, storage_error
from trainer.base.extensions import resolved
from trainer.recipe.reading.files import recipe_endings, recipe_formats


def write_over(path: Path, text: str, option: str) -> None:
    """Write a file for the user, with its folder, in place of an old one; `option` of the command line names it.

    Raises:
        TrainerError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, text)
    except OSError as error:
        raise storage_error(
            f"{path} cannot be written: {error.strerror}; make room, or name another by {option}", error
        ) from error


def write_new(path: Path, text: str, option: str) -> None:
    """Write a new file for the user; `option` of the command line names it.

    Raises:
        UsageError: the file exists, or cannot be written.
    """
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise UsageError(f"{option} must name a new file, but {path} exists; name another") from error
    except OSError as error:
        raise UsageError(f"{option} {path} cannot be written: {error.strerror}; name another") from error


def require_new_recipe(place: Path, option: str, endings: Sequence[str] = ()) -> None:
    """Refuse a file for a recipe before long work.

    Args:
        option: names it on the command line.
        endings: those that are allowed; empty: those of all recipes.

    Raises:
        UsageError: the file exists, its folder does not, or it has another ending.
    """
    endings = endings or recipe_endings()
    if place.suffix.lower() not in endings:
        known = " or ".join(endings)
        raise UsageError(f"`{option}` must end with {known}, but is {place}; rename it")
    if os.path.lexists(place):
        raise UsageError(f"{option} must name a new file, but {place} exists; name another")
    if not place.parent.is_dir():
        raise UsageError(f"{option} must name a file in a folder that exists, but is {place}; make the folder first")


def write_recipe(place: Path, values: Mapping[str, Any], title: str, option: str) -> None:
    """Write the values of a recipe in the format of the ending.

    Raises:
        UsageError: the file exists, or cannot be written.
    """
    write_new(place, recipe_text(place, values, {}, title), option)


def recipe_text(place: Path, values: Mapping[str, Any], comments: Mapping[str, str], title: str) -> str:
    """Return the text of a recipe in the format of the ending; JSON gets no comments.

    Args:
        values: JSON values by their keys.
        comments: the comment of a key, by its dotted path.
        title: the comment at the top.
    """
    if row := recipe_formats().get(place.suffix.lower()):
        text: str = resolved(row.write)(values, comments, title)
        return text
    return json.dumps(values, indent=2) + "\n"


def recipe_name(source: Path) -> str:
    """Return the name of a recipe for a file or a folder."""
    stem = Path(os.path.abspath(source)).name.split(".")[0]
    return re.sub(r"[^A-Za-z0-9_-]+", "_", stem).strip("_-")[:100] or "mine"
