"""The data of a run: its splits, loaded and encoded, with the task that knows their labels.

All problems of data, tokenizer and task are reported together. This module does not depend on engines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from trainer.base.errors import Problems
from trainer.data.collate import TokenMasking
from trainer.data.order import Mixture
from trainer.data.sources import Split, Splits, load_splits, require_one_type
from trainer.data.split import EncodedSplit
from trainer.observe.observer import Observer
from trainer.ranks.environment import cache_folder
from trainer.recipe.schema import Recipe
from trainer.tasks.classes import NamedClasses
from trainer.tasks.registry import build_task
from trainer.tasks.task import Task, TextTask
from trainer.tasks.types import EvaluatedSplit
from trainer.training.data_notes import (
    class_notes,
    encoding_notes,
    mixture_notes,
    position_notes,
    row_notes,
    row_unit,
    trained_notes,
)
from trainer.training.row_encoding import Preparation, load_preparation, resolve_task


@dataclass(frozen=True)
class PreparedData:
    """The encoded splits, the task that knows their labels, and the preparation that encoded them.

    `masking` makes the labels of a task that hides tokens; None: the splits hold labels. `unit` names the rows that a
    step counts: "rows", or "windows" or "packed rows" of them.
    """

    task: Task
    masking: TokenMasking | None
    preparation: Preparation
    train: EncodedSplit
    validation: EncodedSplit | None
    data_notes: tuple[str, ...] = ()
    evaluated: EvaluatedSplit | None = None  # the rows of `validation`
    unit: str = "rows"

    def mixture(self, recipe: Recipe) -> Mixture | None:
        """Return the mixture of the training split's sources; None: an epoch has every row once.

        Raises:
            UsageError: the weight of a source is too small for a row in an epoch.
        """
        weights = recipe.data.source_weights
        if weights is None or not self.train.sources:
            return None
        return Mixture(self.train.sources, weights, recipe.training.seed)

    @property
    def splits(self) -> dict[str, EncodedSplit]:
        """The splits by name: `training`, and `validation` if there is one."""
        return {"training": self.train} | ({} if self.validation is None else {"validation": self.validation})

    def notes(self, max_length: int) -> list[str]:
        """Return notes for the user on tokenizer, rows and classes; rows are cut to `max_length` tokens."""
        encoding = encoding_notes(self.splits, max_length, self.unit, self.task.cut_targets)
        return [*self.preparation.notes, *self.data_notes, *encoding]


class UnknownClassesError(Exception):
    """Error of a check that reads the first rows of a large training split, which may lack some classes."""


def prepare_data(
    recipe: Recipe,
    most_rows: int | None = None,
    cache: Path | None = None,
    load: Callable[[Recipe], Preparation] = load_preparation,
    observer: Observer | None = None,
) -> PreparedData:
    """Load and encode the splits of a recipe; ranks share the cache through file locks.

    Args:
        most_rows: the number of rows to encode of each split, and to read of large files; None: all.
        cache: the folder of the cache; None: that of the recipe, or of the user.
        observer: shows the preparation.

    Raises:
        TrainerError: model or data cannot be reached, or do not fit each other.
        RecipeError: there are several problems.
        UnknownClassesError: the first rows of a large file cannot tell the classes, but all is well with its columns.
    """
    observer = observer or Observer()
    problems = Problems()
    preparation = splits = None
    with problems.collect():
        preparation = load(recipe)
    observer.preparing("loading the data")
    task: Task = build_task(recipe.task)
    label = getattr(recipe.task, "label", None)
    with problems.collect():
        splits = load_splits(recipe.data, label, most_rows, problems, getattr(task, "columns", ()))
    if splits is None:
        problems.raise_all()
    assert splits is not None
    resolved = None
    for split in (splits.train, splits.validation):
        if split is not None:
            with problems.collect():
                require_one_type(split, getattr(task, "columns", ()))
    knows_classes = splits.train.is_whole or not isinstance(task, NamedClasses) or task.class_names is not None
    with problems.collect(), splits.train.names_lines():
        if not knows_classes:
            task.check_columns(splits.train.rows.features, splits.train.where)
        elif preparation is None:
            task.resolve(splits.train.rows, splits.train.where)
        else:
            resolved = resolve_task(recipe, preparation, splits.train)
    if preparation is None or resolved is None:
        other = splits.validation
        if other is not None and other.rows.features != splits.train.rows.features:  # else it has the same problems
            with problems.collect():
                task.check_columns(other.rows.features, other.where)
        problems.raise_all()
        raise UnknownClassesError
    assert preparation is not None
    task, data_notes = resolved
    cache = cache or (Path(recipe.data.cache) if recipe.data.cache else cache_folder())
    used = Splits(splits.train.first(most_rows), splits.validation and splits.validation.first(most_rows))
    masking = train = validation = evaluated = None
    with problems.collect():
        masking = preparation.masking(task, recipe.training.seed)
    with problems.collect():
        train = preparation.encode(_shown(used.train, observer), task, cache)
    if used.validation is not None:
        with problems.collect():
            validation = preparation.encode(_shown(used.validation, observer), task, cache)
            evaluated = EvaluatedSplit(
                used.validation.rows, validation, preparation.text_tokenizer, used.validation.where
            )
    problems.raise_all()
    assert train is not None
    bounded = [
        f"only the first {most_rows:,} rows of {split.where} are checked"
        for split in (splits.train, splits.validation)
        if most_rows is not None and split is not None and not split.first(most_rows).is_whole
    ]
    tokenizer = preparation.text_tokenizer
    own = task.tokenizer_notes(tokenizer) if tokenizer is not None and isinstance(task, TextTask) else []
    prepared = PreparedData(task, masking, preparation, train, validation, evaluated=evaluated)
    source_rows = {"training": len(used.train.rows), "validation": len(used.validation.rows) if used.validation else 0}
    unit = row_unit(recipe, task, prepared.splits, source_rows)
    notes = (
        *splits.notes,
        *data_notes,
        *own,
        *row_notes(recipe, unit, prepared.splits, source_rows),
        *class_notes(task, train, validation),
        *trained_notes(task, train, tokenizer),
        *position_notes(preparation.config, prepared.splits),
        *bounded,
        *mixture_notes(recipe, prepared.mixture(recipe), train.sources),
    )
    return replace(prepared, data_notes=notes, unit=unit)


def _shown(split: Split, observer: Observer) -> Split:
    """Return the split, which tells the observer of its prepared rows."""
    observer.preparing(f"preparing {split.where}")
    return replace(split, show=partial(observer.preparing, f"preparing {split.where}"))
