"""The data of a run: its splits, loaded and encoded, with the task that knows their labels.

All problems of data, tokenizer and task are reported together. This module does not depend on engines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property, partial
from pathlib import Path

from trainer.base.errors import Problems, UsageError
from trainer.checkpoint.counters import Progress
from trainer.data.collate import TokenMasking
from trainer.data.loader import SplitRows, TrainingRows
from trainer.data.order import GlobalOrder, Mixture
from trainer.data.sources import Split, Splits, Stream, load_splits, require_one_type
from trainer.data.split import EncodedSplit
from trainer.data.stream_order import StreamOrder
from trainer.data.streamed_split import StreamedSplit, StreamSettings
from trainer.observe.observer import Observer
from trainer.ranks.environment import cache_folder
from trainer.recipe.schema import FileData, Recipe
from trainer.tasks.registry import build_task
from trainer.tasks.task import Task, TextTask
from trainer.tasks.text.chat_templates import set_date
from trainer.tasks.types import EvaluatedSplit
from trainer.training.data_notes import (
    class_notes,
    encoding_notes,
    mixture_notes,
    position_notes,
    row_notes,
    row_unit,
    stream_notes,
    trained_notes,
)
from trainer.training.preparation import Preparation
from trainer.training.row_encoding import load_preparation, resolve_task


@dataclass(frozen=True)
class PreparedData:
    """The encoded splits, the task that knows their labels, and the preparation that encoded them.

    `masking` makes the labels of a task that hides tokens; None: the splits hold labels. `unit` names the rows that a
    step counts: "rows", or "windows" or "packed rows" of them. If the training split is a stream, `train` are its first
    rows, encoded. `is_whole` is false if only the first rows of a split are here, and `counts_rows` if a tokenizer that
    stands in decides their number. `day` is the date of the run if a chat template writes it.
    """

    task: Task
    masking: TokenMasking | None
    preparation: Preparation
    train: EncodedSplit
    validation: EncodedSplit | None
    data_notes: tuple[str, ...] = ()
    evaluated: EvaluatedSplit | None = None  # the rows of `validation`
    unit: str = "rows"
    stream: StreamedSplit | None = None
    is_whole: bool = True
    counts_rows: bool = True
    day: str | None = None

    @property
    def num_train_rows(self) -> int:
        """The number of encoded rows of an epoch; an estimate if a stream's task changes the number of rows."""
        return len(self.train if self.stream is None else self.stream)

    @property
    def train_hash(self) -> str:
        """The hash of the content of the training split."""
        return (self.train if self.stream is None else self.stream).content_hash

    def training_rows(self, recipe: Recipe, progress: Progress) -> TrainingRows:
        """Return the rows of the global batches that `progress` has not passed yet.

        Raises:
            UsageError: no global batch starts there.
        """
        size = recipe.training.global_batch_size
        if self.stream is not None:
            return StreamOrder(self.stream, size, progress.step, progress.samples, progress.place)
        lengths = self.train.lengths if recipe.data.group_by_length else None
        mixture = self.mixture(recipe)
        order = GlobalOrder(len(self.train), lengths, size, recipe.training.seed, mixture)
        return SplitRows(self.train, order, progress.samples)

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
    day: str | None = None,
) -> PreparedData:
    """Load and encode the splits of a recipe; ranks share the cache through file locks.

    Args:
        most_rows: the number of rows to encode of each split, and to read of large files; None: all.
        cache: the folder of the cache; None: that of the recipe, or of the user.
        observer: shows the preparation.
        day: the date of the run, if `data.date` is null; None: today's.

    Raises:
        TrainerError: model or data cannot be reached, or do not fit each other.
        RecipeError: there are several problems.
        UnknownClassesError: the first rows of a large file cannot tell the classes, but all is well with its columns.
    """
    observer = observer or Observer()
    observer.preparing("loading the data")
    problems = Problems()
    task: Task = build_task(recipe.task)
    preparation, splits = _load(recipe, task, most_rows, load, problems)
    loaded = _resolve(task, preparation, splits, most_rows, problems)
    day = _written_date(recipe, loaded.task, loaded.preparation, splits.train, day)  # before the template is used
    cache = cache or (Path(recipe.data.cache) if recipe.data.cache else cache_folder())
    encoded = _encode(recipe, loaded, cache, observer, problems)
    return _with_notes(recipe, loaded, replace(encoded, day=day))


@dataclass(frozen=True)
class _Loaded:
    """The splits of a recipe, before they are encoded, and the task that knows their labels.

    Attributes:
        splits: as they were read.
        used: the rows of them that are encoded, at most `most_rows` of each.
        notes: notes on the labels.
    """

    task: Task
    preparation: Preparation
    splits: Splits
    most_rows: int | None
    notes: Sequence[str]

    @cached_property
    def used(self) -> Splits:
        train, validation = self.splits.train, self.splits.validation
        return Splits(train.first(self.most_rows), validation and validation.first(self.most_rows))


def _load(
    recipe: Recipe, task: Task, most_rows: int | None, load: Callable[[Recipe], Preparation], problems: Problems
) -> tuple[Preparation | None, Splits]:
    """Load the tokenizer or image processor, and the rows. A problem of the first does not hide those of the rows."""
    preparation = splits = None
    with problems.collect():
        preparation = load(recipe)
    label = getattr(recipe.task, "label", None)
    with problems.collect():
        splits = load_splits(recipe.data, label, most_rows, problems, task.columns, task.cell_kinds)
    if splits is None:
        problems.raise_all()
    assert splits is not None
    for split in (splits.train, splits.validation):
        if split is not None:
            with problems.collect():
                require_one_type(split, task.columns)
    return preparation, splits


def _resolve(
    task: Task, preparation: Preparation | None, splits: Splits, most_rows: int | None, problems: Problems
) -> _Loaded:
    """Resolve the task with the labels of the training split.

    Raises:
        RecipeError, TrainerError: the labels are not known, or there is no `preparation`.
        UnknownClassesError: see `prepare_data`.
    """
    train, other = splits.train, splits.validation
    knows_classes = train.is_whole or task.class_names is not None
    with problems.collect(), train.explains_rows():
        if not knows_classes:
            task.check_columns(train.rows.features, train.where)
        elif preparation is None:
            task.resolve(train.rows, train.where)
        else:
            resolved, notes = resolve_task(task, preparation, train)
            return _Loaded(resolved, preparation, splits, most_rows, notes)
    if other is not None and other.rows.features != train.rows.features:  # else it has the same problems
        with problems.collect():
            task.check_columns(other.rows.features, other.where)
    problems.raise_all()
    raise UnknownClassesError


def _encode(recipe: Recipe, loaded: _Loaded, cache: Path, observer: Observer, problems: Problems) -> PreparedData:
    """Encode the splits, without notes; the problems of each are raised together with the earlier ones."""
    task, preparation, used = loaded.task, loaded.preparation, loaded.used
    masking = train = validation = evaluated = stream = None
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
    if train is not None:
        with problems.collect():
            stream = _streamed(recipe, loaded, cache, train, observer)
    problems.raise_all()
    assert train is not None
    return PreparedData(task, masking, preparation, train, validation, evaluated=evaluated, stream=stream)


def _with_notes(recipe: Recipe, loaded: _Loaded, data: PreparedData) -> PreparedData:
    """Return the data with notes on its splits, its rows and its tokens."""
    task, preparation, splits, stream = data.task, data.preparation, loaded.splits, data.stream
    bounded = _bounds(splits, loaded.most_rows)
    counts_tokens = preparation.counts_tokens
    counts_rows = counts_tokens or _keeps_rows(recipe, task)
    unit, numbers = _numbers(recipe, loaded, data, counts_rows)
    notes = (
        *splits.notes,
        *loaded.notes,
        *(_tokenizer_notes(task, preparation) if counts_tokens else ()),
        *numbers,
        *(() if splits.stream else class_notes(task, data.train, data.validation)),
        *_date_notes(data),
        *(_token_notes(data) if counts_tokens else ()),
        *bounded,
        *(mixture_notes(recipe, stream.windows if stream else data.mixture(recipe)) if counts_rows else ()),
    )
    is_whole = not bounded and (stream is None) == (splits.stream is None)
    return replace(data, data_notes=notes, unit=unit, is_whole=is_whole, counts_rows=counts_rows)


def _bounds(splits: Splits, most_rows: int | None) -> list[str]:
    """Return notes on the splits that are read in part; a stream always is."""
    if most_rows is None:
        return []
    return [
        f"only the first {most_rows:,} rows of {split.where} are checked"
        for split in ((None if splits.stream else splits.train), splits.validation)
        if split is not None and not split.first(most_rows).is_whole
    ]


def _numbers(recipe: Recipe, loaded: _Loaded, data: PreparedData, counts_rows: bool) -> tuple[str, list[str]]:
    """Return the name of encoded rows, and notes on their number."""
    train, validation = loaded.used.train, loaded.used.validation
    source_rows = {"training": len(train.rows), "validation": len(validation.rows) if validation else 0}
    unit = row_unit(recipe, data.task, data.splits, source_rows)
    if loaded.splits.stream:
        return unit, stream_notes(recipe, data.stream, loaded.splits)
    return unit, row_notes(recipe, unit, data.splits, source_rows) if counts_rows else []


def _written_date(recipe: Recipe, task: Task, preparation: Preparation, train: Split, day: str | None) -> str | None:
    """Let the chat template write the date of the run, and return it; None: it writes no date, or `data.date`."""
    tokenizer, features = preparation.text_tokenizer, train.rows.features
    if tokenizer is None or not recipe.task.traits.chats or recipe.data.date is not None:
        return None
    from trainer.tasks.text.chats import holds_chats

    if not any(holds_chats(features[name]) for name in task.columns if name in features):
        return None
    day = day or date.today().isoformat()
    return day if set_date(tokenizer, day) else None


def _date_notes(data: PreparedData) -> list[str]:
    if data.day is None or data.preparation.text_tokenizer is None:
        return []
    template = f"the chat template of `{data.preparation.text_tokenizer.name_or_path}`"
    return [
        f"{template} writes the date of the first start of a run, here {data.day}; set `data.date` to it to repeat the"
        " run on another day"
    ]


def _tokenizer_notes(task: Task, preparation: Preparation) -> list[str]:
    tokenizer = preparation.text_tokenizer
    return task.tokenizer_notes(tokenizer) if tokenizer is not None and isinstance(task, TextTask) else []


def _token_notes(data: PreparedData) -> list[str]:
    preparation = data.preparation
    return [
        *trained_notes(data.task, data.train, preparation.text_tokenizer),
        *position_notes(preparation.config, data.splits),
    ]


def _streamed(
    recipe: Recipe, loaded: _Loaded, cache: Path, head: EncodedSplit, observer: Observer
) -> StreamedSplit | None:
    """Return the stream of the training split; None: it is no stream, or only its first rows are read."""
    stream, data, training = loaded.splits.stream, recipe.data, recipe.training
    if stream is None:
        return None
    _require_steps(recipe, loaded.task, stream)
    if loaded.most_rows is not None:
        return None
    observer.preparing("reading the index of data.train")
    assert isinstance(data, FileData)
    # Torch's loader keeps two batches of each worker ready.
    rows_ahead = (2 * data.num_workers + 2) * training.global_batch_size
    settings = StreamSettings(
        data.shuffle_window,
        data.mixture,
        training.seed,
        run=recipe.checkpoint.folder,
        behind=1 + -(-rows_ahead // data.shuffle_window),
    )
    encoder = loaded.preparation.for_windows(stream, loaded.task, head)
    return StreamedSplit(stream.sources, settings, encoder, head, len(loaded.splits.train.rows), cache)


def _require_steps(recipe: Recipe, task: Task, stream: Stream) -> None:
    """Refuse epochs of a stream if task or map change the number of rows, so that no epoch has known steps.

    Raises:
        UsageError: a key counts epochs.
    """
    drops_rows = stream.row_map is not None and stream.row_map.conditions
    if _keeps_rows(recipe, task) and not drops_rows:
        return
    why = "because task or map change the number of rows, so the number of steps of an epoch of a stream is unknown"
    if recipe.training.max_steps is None:
        raise UsageError(f"`training.max_steps` must be set with `data.streaming`, {why}")
    for key, every in (
        ("evaluation.every", recipe.evaluation.every if recipe.data.validation is not None else None),
        ("checkpoint.every", recipe.checkpoint.every),
        ("logging.every", recipe.logging.every),
        ("training.check_replicas", recipe.training.check_replicas),
    ):
        if every is not None and every.unit == "epochs":
            raise UsageError(f'`{key}` must count steps, such as "1000 steps", but is {every}, {why}')


def _keeps_rows(recipe: Recipe, task: Task) -> bool:
    """Return whether each row of the source becomes one encoded row."""
    return task.keeps_rows and task.packer(recipe.data.max_length) is None


def _shown(split: Split, observer: Observer) -> Split:
    """Return the split, which reports its prepared rows to the observer."""
    observer.preparing(f"preparing {split.where}")
    return replace(split, show=partial(observer.preparing, f"preparing {split.where}"))
