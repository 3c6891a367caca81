"""The folders of token ids that a recipe names; every run imports this module, and the check only beside one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from trainer.base.text import without_secrets
from trainer.data.sources import Splits
from trainer.recipe.paths import is_url
from trainer.recipe.schema import FileData, Recipe
from trainer.training.row_encoding import ENCODED


def require_fit(recipe: Recipe, splits: Splits) -> Splits:
    """Return the splits; refuse a folder of token ids that another recipe wrote; see `checked`."""
    if not (found := list(_folders(recipe))):
        return splits
    from trainer.features.encoded.checking import checked

    return checked(recipe, splits, found)


def _folders(recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    """Yield the key, the place and the description of each folder of token ids that the recipe names."""
    data = recipe.data
    if not isinstance(data, FileData):
        return
    for key, named in (("data.train", data.train), ("data.validation", data.validation)):
        entries = [named] if isinstance(named, str) else named if isinstance(named, list) else []
        for folder in dict.fromkeys(entry.rpartition("/")[0] for entry in entries):
            folder = folder if is_url(folder) else _unescaped(folder)
            if (description := _description(folder)) is not None:
                yield key, without_secrets(folder), description


def _unescaped(folder: str) -> str:
    """Return a folder in which `glob.escape` has put brackets around characters of patterns."""
    return re.sub(r"\[([*?[])\]", r"\1", folder)


def _description(folder: str) -> str | None:
    if not is_url(folder):
        path = Path(folder) / ENCODED
        return path.read_text(encoding="utf-8") if path.is_file() else None
    from fsspec.core import url_to_fs

    files, path = url_to_fs(f"{folder}/{ENCODED}")
    return files.cat_file(path).decode() if files.exists(path) else None
