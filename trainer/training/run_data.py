"""The data of a run: its splits, loaded and encoded, with the task that knows their labels.

All problems of data, tokenizer and task are reported together. This module does not depend on engines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from trainer.base.errors import Problems
from trainer.data.collate import TokenMasking
from trainer.data.order import Mixture
from trainer.data.sources import Split, Splits, load_splits, require_one_type
from trainer.data.split import EncodedSplit
from trainer.models.building import rotary_positions
from trainer.observe.observer import Observer
from trainer.ranks.environment import cache_folder
from trainer.recipe.schema import FileData, Recipe
from trainer.tasks.classes import NamedClasses
from trainer.tasks.registry import build_task
from trainer.tasks.task import Task, TextTask
from trainer.tasks.types import EvaluatedSplit
from trainer.training.row_encoding import Preparation, load_preparation, resolve_task, unknown_notes
from trainer.training.run_info import class_notes


@dataclass(frozen=True)
class PreparedData:
    """The encoded splits, the task that knows their labels, and the preparation that encoded them.

    `masking` makes the labels of a task that hides tokens; None: the splits hold labels.
    """

    task: Task
    masking: TokenMasking | None
    preparation: Preparation
    train: EncodedSplit
    validation: EncodedSplit | None
    data_notes: tuple[str, ...] = ()
    evaluated: EvaluatedSplit | None = None  # the rows of `validation`

    def mixture(self, recipe: Recipe) -> Mixture | None:
        """Return the mixture of the training split's sources; None: an epoch has every row once.

        Raises:
            UsageError: the weight of a source is too small for a row in an epoch.
        """
        weights = recipe.data.source_weights
        if weights is None or not self.train.sources:
            return None
        return Mixture(self.train.sources, weights, recipe.training.seed)

    def notes(self, max_length: int) -> list[str]:
        """Return notes on tokenizer and classes, on rows cut to `max_length` tokens, and on unknown tokens."""
        cut = [
            f"cut to `data.max_length` ({max_length} tokens): {split.num_cut:,} of {len(split):,} {name} rows"
            for name, split in (("training", self.train), ("validation", self.validation))
            if split is not None and split.num_cut
        ]
        targets = [
            f"targets cut to `task.max_target_length`: {split.num_cut_targets:,} of {len(split):,} {name} rows"
            for name, split in (("training", self.train), ("validation", self.validation))
            if split is not None and split.num_cut_targets
        ]
        return [*self.preparation.notes, *self.data_notes, *cut, *targets, *unknown_notes(self.train, self.validation)]


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
        recipe: the recipe.
        most_rows: the number of rows to encode of each split, and to read of large files; None: all.
        cache: the folder of the cache; None: that of the recipe, or of the user.
        load: loads the preparation.
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
    with problems.collect():
        splits = load_splits(recipe.data, getattr(recipe.task, "label", None), most_rows, problems)
    task: Task = build_task(recipe.task)
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
        if splits.validation is not None:
            with problems.collect():
                task.check_columns(splits.validation.rows.features, splits.validation.where)
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
    found = (*_row_notes(recipe, task, used, train, validation), *class_notes(task, train, validation))
    found = (*found, *_position_notes(preparation.config, train, validation))
    tokenizer = preparation.text_tokenizer
    own = task.tokenizer_notes(tokenizer) if tokenizer is not None and isinstance(task, TextTask) else []
    notes = (*splits.notes, *data_notes, *own, *found, *bounded)
    prepared = PreparedData(task, masking, preparation, train, validation, notes, evaluated)
    return replace(prepared, data_notes=(*notes, *_mixture_notes(recipe, prepared)))


def _shown(split: Split, observer: Observer) -> Split:
    """Return the split, which tells the observer of its prepared rows."""
    observer.preparing(f"preparing {split.where}")
    return replace(split, show=partial(observer.preparing, f"preparing {split.where}"))


def _position_notes(config: Any, train: EncodedSplit, validation: EncodedSplit | None) -> list[str]:
    """Return a note on each split with later positions than those of a model with rotary positions."""
    positions = rotary_positions(config)
    notes = []
    for name, split in (("training", train), ("validation", validation)):
        if positions is None or split is None or not len(split):
            continue
        own = split.tokens.get("position_ids")  # of packed documents
        longest = int(split.lengths.max()) if own is None else int(own.max()) + 1
        if longest > positions:
            notes.append(
                f"{name} rows have up to {longest} tokens, more than the {positions} positions of the model"
                " (`max_position_embeddings`), beyond which its quality suffers; lower `data.max_length`, or scale the"
                " positions by `model.config.rope_parameters`"
            )
    return notes


def _mixture_notes(recipe: Recipe, prepared: PreparedData) -> list[str]:
    """Return a note on the share of each source in an epoch, or on a check that does not count the rows of sources."""
    if recipe.data.source_weights is None:
        return []
    mixture = prepared.mixture(recipe)
    if mixture is None:
        return [
            "mixture: this check read only a part of the rows, so the run finds weights that are too small at its start"
        ]
    assert isinstance(recipe.data, FileData)
    return [
        f"mixture: {count:,} of the {mixture.num_rows:,} rows of an epoch are of `{entry}`, which has {size:,}:"
        f" {count / size:.2f} passes"
        for entry, count, size in zip(recipe.data.train, mixture.counts, prepared.train.sources, strict=True)
    ]


def _row_notes(
    recipe: Recipe, task: Task, splits: Splits, train: EncodedSplit, validation: EncodedSplit | None
) -> list[str]:
    """Return a note on each split that has another number of rows after its preparation, or too few for a batch."""
    length = recipe.data.max_length
    unit = "packed rows" if isinstance(task, TextTask) and task.packer(length) else "windows"
    size = recipe.training.global_batch_size
    batch = f"`training.global_batch_size` is {size}, but a step has at most the {len(train):,} rows of an epoch"
    return [batch] * (size > len(train)) + [
        f"{len(split.rows):,} {name} rows became {len(encoded):,} {unit} of at most {length} tokens"
        for name, split, encoded in (
            ("training", splits.train, train),
            ("validation", splits.validation, validation),
        )
        if split is not None and encoded is not None and len(split.rows) != len(encoded)
    ]
