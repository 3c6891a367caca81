"""Files of recipes that tools write: their endings, their names, and the text of YAML with comments."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.base.disk import write_new
from trainer.base.errors import UsageError
from trainer.recipe.reading.files import ENDINGS, is_yaml

_PLAIN = re.compile(r"[A-Za-z_/.][\w./-]*")
_WORDS = {"true", "false", "null", "yes", "no", "on", "off", "y", "n", ".nan", ".inf"}  # also those of YAML 1.1


def check_new_recipe(place: Path, option: str, endings: Sequence[str] = ENDINGS) -> None:
    """Refuse a file for a recipe before long work; `option` of the command line names it.

    Raises:
        UsageError: the file exists, its folder does not, or it has another ending.
    """
    if place.suffix.lower() not in endings:
        known = " or ".join(endings)
        raise UsageError(f"`{option}` must end with {known}, but is {place}; rename it")
    if os.path.lexists(place):
        raise UsageError(f"{option} must name a new file, but {place} exists; name another")
    if not place.parent.is_dir():
        raise UsageError(f"{option} must name a file in a folder that exists, but is {place}; make the folder first")


def write_recipe(place: Path, values: Mapping[str, Any], title: str, option: str) -> None:
    """Write the values of a recipe: as JSON, or as YAML by the ending.

    Raises:
        UsageError: the file exists, or cannot be written.
    """
    write_new(place, recipe_text(values, {}, title) if is_yaml(place) else json.dumps(values, indent=2) + "\n", option)


def recipe_name(source: Path) -> str:
    """Return the name of a recipe for a file or a folder."""
    stem = Path(os.path.abspath(source)).name.split(".")[0]
    return re.sub(r"[^A-Za-z0-9_-]+", "_", stem).strip("_-")[:100] or "mine"


def recipe_text(values: Mapping[str, Any], comments: Mapping[str, str], title: str) -> str:
    """Return the text of a recipe.

    Args:
        values: JSON values by their keys.
        comments: the comment of a key, by its dotted path.
        title: the comment at the top.
    """
    return "\n".join([_comment(title), *_lines(values, comments, ""), ""])


def _comment(text: str) -> str:
    """Return a comment on one line; names of columns and files may hold line breaks."""
    return "# " + "".join(one if one.isprintable() else " " for one in text)


def _lines(values: Mapping[str, Any], comments: Mapping[str, str], path: str) -> Iterator[str]:
    indent = "  " * path.count(".")
    for key, value in values.items():
        comment = f"  {_comment(comments[path + key])}" if path + key in comments else ""
        is_section = isinstance(value, dict) and value
        yield f"{indent}{_scalar(key)}:{'' if is_section else ' ' + _flow(value)}{comment}"
        if is_section:
            yield from _lines(value, comments, f"{path}{key}.")


def _flow(value: Any) -> str:
    return f"[{', '.join(map(_flow, value))}]" if isinstance(value, list) else _scalar(value)


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    shown = json.dumps(value, ensure_ascii=False)
    # YAML allows no control characters, and reads the escapes of JSON in double quotes.
    return shown if shown.isprintable() else json.dumps(value)
