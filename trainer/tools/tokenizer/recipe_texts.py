"""The training texts of a recipe, from its files, its data set or its stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.base.errors import DataError, Problems
from trainer.base.text import listed
from trainer.data.sources import Split
from trainer.ranks.environment import cache_folder
from trainer.recipe.schema import Recipe
from trainer.tasks.registry import build_task
from trainer.tools.tokenizer.texts import Texts
from trainer.training.row_source import row_source
from trainer.training.run_data import read_splits

_ROWS_AT_ONCE = 1000


@dataclass
class RecipeTexts(Texts):
    """The texts of the columns that the task reads, row by row; classes are no texts."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(["data.train"])
        self._recipe = recipe

    def _all(self) -> Iterator[str]:
        recipe, problems = self._recipe, Problems()
        task, source = build_task(recipe.task), row_source(recipe)
        split = read_splits(recipe, task, None, problems, source).train
        problems.raise_all()
        names = _columns_of_texts(split, task.columns, getattr(recipe.task, "label", None))
        self.column = ", ".join(names)
        cache = Path(recipe.data.cache) if recipe.data.cache else cache_folder()
        parts = source.parts(recipe, task.columns, cache, _ROWS_AT_ONCE) if source else ()
        chunks = (rows for part in parts for _, rows in part.read()) if source else _chunks(split)
        for rows in chunks:
            for row in rows.select_columns(names):
                yield from (text for text in row.values() if text and text.strip())


def _columns_of_texts(split: Split, columns: Sequence[str], label: str | None) -> list[str]:
    kinds = {name: getattr(kind, "dtype", None) for name, kind in split.rows.features.items()}
    names = [name for name in columns if name != label and kinds.get(name) in ("string", "large_string")]
    if not names:
        known = listed([f"`{name}`" for name in columns], 9)
        raise DataError(
            f"`task` must read a column of texts, but {known} of {split.where} hold none; train the tokenizer on"
            " files of texts by `trainer tokenizer`"
        )
    return names


def _chunks(split: Split) -> Iterator[Any]:
    for first in range(0, len(split.rows), _ROWS_AT_ONCE):
        yield split.rows.select(range(first, min(first + _ROWS_AT_ONCE, len(split.rows))))
