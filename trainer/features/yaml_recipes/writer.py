"""Recipes as text of YAML with comments; a reader of YAML 1.1 finds the same values, but for numbers such as 2e-05."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

_PLAIN = re.compile(r"[A-Za-z_/.][\w./-]*")
_WORDS = {"true", "false", "null", "yes", "no", "on", "off", "y", "n", ".nan", ".inf"}  # also those of YAML 1.1


def recipe_text(values: Mapping[str, Any], comments: Mapping[str, str], title: str) -> str:
    """Return the text of a recipe; see `RecipeFormat`."""
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
