"""The recipes and launchers that are installed with the trainer."""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from pathlib import Path

import trainer
from trainer.base.extensions import registered
from trainer.recipe.reading.files import read_file, recipe_endings

_PACKAGE = Path(trainer.__file__).resolve().parent


def shipped_folder(name: str = "recipes") -> Path:
    """Return the folder `recipes` or `launchers`: beside the package in a checkout, inside it in a wheel."""
    installed = _PACKAGE / f"shipped_{name}"
    return installed if installed.is_dir() else _PACKAGE.parent / name


def own_recipes() -> dict[str, Path]:
    """Return the files by name of this project and its features."""
    rows = [row.value for row in registered("recipes")]
    folders = [*(_PACKAGE / value for value in rows if isinstance(value, str)), shipped_folder()]
    return dict(sorted((name, path) for folder in folders for name, path in recipes_in(folder).items()))


def shipped_recipes() -> dict[str, Path]:
    """Return the files by name (`bert_sample`), including bases that other recipes extend, and registered folders.

    A shipped recipe takes precedence over a registered one.
    """
    folders = [row.value for row in reversed(registered("recipes")) if isinstance(row.value, Path)]
    return {name: path for folder in folders for name, path in recipes_in(folder).items()} | own_recipes()


def is_shipped(path: str) -> bool:
    """Return whether an absolute path is below the package or its recipes."""
    return path.startswith(tuple(f"{folder}{os.sep}" for folder in (_PACKAGE, shipped_folder())))


def recipes_in(folder: Path) -> dict[str, Path]:
    """Return the recipe files of a folder by name."""
    return {path.stem: path for path in sorted(folder.glob("*")) if path.suffix in recipe_endings()}


def without_ending(name: str) -> str:
    """Return the name of a recipe without the ending of its file."""
    return name[: -len(Path(name).suffix)] if Path(name).suffix.lower() in recipe_endings() else name


def is_base(path: Path) -> bool:
    """Return whether a recipe has no name, so that it can only be extended."""
    return "name" not in read_file(path)[0].members


def missing_base(path: Path) -> str | None:
    """Return the first recipe that a shipped one extends and that is not here; None if all are."""
    extends = read_file(path)[0].members.get("extends")
    if extends is None or not isinstance(extends.value, str):
        return None
    beside = path.parent / extends.value
    base = beside if beside.is_file() else shipped_recipes().get(without_ending(extends.value))
    return extends.value if base is None else missing_base(base)


def summary(path: Path) -> str:
    """Return the first sentence of the comment at the top of a recipe; empty without a comment."""
    comment = re.match(r"(?:\s*(?://|#)[^\n]*\n)+", path.read_text(encoding="utf-8"))
    if comment is None:
        return ""
    text = " ".join(line.strip().lstrip("/#").strip() for line in comment.group().splitlines() if line.strip())
    return re.split(r"(?<=[.?!])\s(?=[A-Z])", text, maxsplit=1)[0]


def meant(name: str) -> str:
    """Return a hint for the name of a recipe that is not shipped."""
    shipped = shipped_recipes()
    beside = [without_ending(name) + ending for ending in recipe_endings()]
    if existing := [file for file in beside if os.path.isfile(os.path.expanduser(file))]:
        return f"did you mean {existing[0]}?"
    near = get_close_matches(without_ending(Path(name).name), shipped, n=3, cutoff=0.0)
    return f"the nearest are {', '.join(near)}; `trainer recipes` lists all {len(shipped)}"
