"""The recipes that come with the program."""

from __future__ import annotations

import re
from pathlib import Path

import trainer
from trainer.recipe.reading import read_file

_PACKAGE = Path(trainer.__file__).resolve().parent
_INSTALLED = _PACKAGE / "shipped_recipes"  # where the wheel puts them
_CHECKOUT = _PACKAGE.parent / "recipes"


def shipped_folder() -> Path:
    """The folder of the shipped recipes: beside the package in a checkout, inside it when installed from a wheel."""
    return _INSTALLED if _INSTALLED.is_dir() else _CHECKOUT


def shipped_recipes() -> dict[str, Path]:
    """The files by name (`bert_sample`), bases that other recipes extend included."""
    return {path.stem: path for path in sorted(shipped_folder().glob("*.json"))}


def is_base(path: Path) -> bool:
    """Whether a recipe is there for others to extend: it has no name, and cannot run by itself."""
    return "name" not in read_file(path)[0].members


def summary(path: Path) -> str:
    """The first sentence of a recipe's opening comment; empty where there is none."""
    comment = re.match(r"(?:\s*//[^\n]*\n)+", path.read_text(encoding="utf-8"))
    if comment is None:
        return ""
    text = " ".join(line.strip().lstrip("/").strip() for line in comment.group().splitlines() if line.strip())
    return re.split(r"(?<=[.?!])\s(?=[A-Z])", text, maxsplit=1)[0]
