"""The data of a run: its splits, loaded and encoded, with the task that knows their labels.

All problems of data, tokenizer and task are reported together. This module does not depend on engines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property, partial
from pathlib import Path

from trainer.base.errors import Problems
from trainer.checkpoint.counters import Progress
from trainer.data.loader import SplitRows, TrainingRows
from trainer.data.order import GlobalOrder, Mixture
from trainer.data.sources import Split, Splits, load_splits, require_one_type
from trainer.data.split import EncodedSplit
from trainer.observe.observer import Observer
from trainer.parallel.microbatch import TokenMasking
from trainer.ranks.environment import cache_folder
from trainer.recipe.registered import all_of, asked_for
from trainer.recipe.schema import Recipe
from trainer.tasks.registry import build_task
from trainer.tasks.task import Task, TextTask
from trainer.tasks.types import EvaluatedSplit
from trainer.training.data_notes import encoding_notes, mixture_notes, position_notes, row_notes, row_unit
from trainer.training.preparation import Preparation
from trainer.training.row_encoding import load_preparation, resolve_task
from trainer.training.row_source import OpenedSplit, RowSource, row_source


@dataclass(frozen=True)
class PreparedData:
    """The encoded splits, the task that knows their labels, and the preparation that encoded them.

    `masking` makes the labels of a task that hides tokens; None: the splits hold labels. `unit` names the rows that a
    step counts: "rows", or "windows" or "packed rows" of them. If a feature reads the training split, `train` are its
    first rows, and a run has it `opened`. `is_whole` is false if only the first rows of a split are here, and
    `counts_rows` if a tokenizer that stands in decides their number. `day` is the date of the run if a chat template
    writes it.
    """

    task: Task
    masking: TokenMasking | None
    preparation: Preparation
    train: EncodedSplit
    validation: EncodedSplit | None
    data_notes: tuple[str, ...] = ()
    evaluated: EvaluatedSplit | None = None  # the rows of `validation`
    unit: str = "rows"
    opened: OpenedSplit | None = None
    is_whole: bool = True
    counts_rows: bool = True
    day: str | None = None

    @property
    def num_train_rows(self) -> int:
        """The number of encoded rows of an epoch; perhaps an estimate for the split of a feature."""
        return len(self._trained)

    @property
    def train_hash(self) -> str:
        """The hash of the content of the training split."""
        return self._trained.content_hash

    @property
    def _trained(self) -> OpenedSplit | EncodedSplit:
        return self.train if self.opened is None else self.opened

    def training_rows(self, recipe: Recipe, progress: Progress) -> TrainingRows:
        """Return the rows of the global batches that `progress` has not passed yet.

        Raises:
            UsageError: no global batch starts there.
        """
        if self.opened is not None:
            return self.opened.rows(recipe, progress)
        mixture = self.mixture(recipe)
        for sizes in asked_for("batch_sizes", recipe):
            rows: TrainingRows = sizes(recipe).rows(self.train, mixture, progress.samples)
            return rows
        size = recipe.training.global_batch_size
        lengths = self.train.lengths if recipe.data.group_by_length else None
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
    source = row_source(recipe)
    preparation, splits = _load(recipe, task, most_rows, load, problems, source)
    loaded = replace(_resolve(task, preparation, splits, most_rows, problems), source=source)
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
        source: the feature that reads the training split; None: it was read whole.
    """

    task: Task
    preparation: Preparation
    splits: Splits
    most_rows: int | None
    notes: Sequence[str]
    source: RowSource | None = None

    @cached_property
    def used(self) -> Splits:
        train, validation = self.splits.train, self.splits.validation
        return Splits(train.first(self.most_rows), validation and validation.first(self.most_rows))


SplitsChange = Callable[[Recipe, Splits], Splits]
"""A registered function that changes the splits of a recipe with its key, before they are encoded."""


def read_splits(
    recipe: Recipe, task: Task, most_rows: int | None, problems: Problems | None, source: RowSource | None
) -> Splits:
    """Read the rows of a recipe; the arguments are those of `load_splits`, and the feature that reads its stream."""
    label = getattr(recipe.task, "label", None)
    read = partial(source.read, recipe) if source else None
    splits = load_splits(recipe.data, label, most_rows, problems, task.columns, task.cell_kinds, read)
    changes: list[SplitsChange] = asked_for("splits", recipe)
    for change in changes:
        splits = change(recipe, splits)
    return splits


def _load(
    recipe: Recipe,
    task: Task,
    most_rows: int | None,
    load: Callable[[Recipe], Preparation],
    problems: Problems,
    source: RowSource | None,
) -> tuple[Preparation | None, Splits]:
    """Load the preparation and the rows. A problem of the first does not hide those of the rows."""
    preparation = splits = None
    with problems.collect():
        preparation = load(recipe)
    with problems.collect():
        splits = read_splits(recipe, task, most_rows, problems, source)
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
    masking = train = validation = evaluated = opened = None
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
    if train is not None and (source := loaded.source):
        with problems.collect():
            source.check(recipe, task)
            if loaded.most_rows is None:
                observer.preparing("reading the index of data.train")
                opened = source.open(recipe, task, preparation, loaded.splits.train, train, cache)
    problems.raise_all()
    assert train is not None
    return PreparedData(task, masking, preparation, train, validation, evaluated=evaluated, opened=opened)


DataWarnings = Callable[[PreparedData, bool], list[str]]
"""A registered function that returns warnings; the second argument: only the first rows of the training are known."""


def _with_notes(recipe: Recipe, loaded: _Loaded, data: PreparedData) -> PreparedData:
    """Return the data with notes on its splits, its rows and its tokens."""
    task, preparation, splits, opened = data.task, data.preparation, loaded.splits, data.opened
    bounded = _bounds(loaded)
    counts_tokens = preparation.counts_tokens
    counts_rows = counts_tokens or _keeps_rows(recipe, task)
    unit, numbers = _numbers(recipe, loaded, data, counts_rows)
    warners: Mapping[str, DataWarnings] = all_of("warnings")
    notes = (
        *splits.notes,
        *loaded.notes,
        *(_tokenizer_notes(task, preparation, splits.train) if counts_tokens else ()),
        *numbers,
        *(note for warn in warners.values() for note in warn(data, loaded.source is not None)),
        *_date_notes(data),
        *(position_notes(preparation.config, data.splits) if counts_tokens else ()),
        *bounded,
        *(mixture_notes(recipe, data.mixture(recipe) if opened is None else opened.shares) if counts_rows else ()),
    )
    is_whole = not bounded and (opened is None) == (loaded.source is None)
    return replace(data, data_notes=notes, unit=unit, is_whole=is_whole, counts_rows=counts_rows)


def _bounds(loaded: _Loaded) -> list[str]:
    """Return notes on the splits that are read in part; that of a feature always is."""
    splits, most_rows = loaded.splits, loaded.most_rows
    if most_rows is None:
        return []
    return [
        f"only the first {most_rows:,} rows of {split.where} are checked"
        for split in (None if loaded.source else splits.train, splits.validation)
        if split is not None and not split.first(most_rows).is_whole
    ]


def _numbers(recipe: Recipe, loaded: _Loaded, data: PreparedData, counts_rows: bool) -> tuple[str, list[str]]:
    """Return the name of encoded rows, and notes on their number."""
    train, validation = loaded.used.train, loaded.used.validation
    source_rows = {"training": len(train.rows), "validation": len(validation.rows) if validation else 0}
    unit = row_unit(recipe, data.task, data.splits, source_rows)
    if loaded.source:
        return unit, loaded.source.notes(recipe, len(loaded.splits.train.rows))
    return unit, row_notes(recipe, unit, data.splits, source_rows) if counts_rows else []


def _written_date(recipe: Recipe, task: Task, preparation: Preparation, train: Split, day: str | None) -> str | None:
    """Let the chat template write the date of the run, and return it; None: it writes no date, or `data.date`."""
    tokenizer, features = preparation.text_tokenizer, train.rows.features
    if tokenizer is None or not recipe.task.traits.chats or recipe.data.date is not None:
        return None
    from trainer.tasks.text.answers import holds_chats, required_chats

    if not any(holds_chats(features[name]) for name in task.columns if name in features):
        return None
    day = day or date.today().isoformat()
    return day if required_chats().set_date(tokenizer, day) else None


def _date_notes(data: PreparedData) -> list[str]:
    if data.day is None or data.preparation.text_tokenizer is None:
        return []
    template = f"the chat template of `{data.preparation.text_tokenizer.name_or_path}`"
    return [
        f"{template} writes the date of the first start of a run, here {data.day}; set `data.date` to it to repeat the"
        " run on another day"
    ]


def _tokenizer_notes(task: Task, preparation: Preparation, train: Split) -> list[str]:
    tokenizer = preparation.text_tokenizer
    if tokenizer is None or not isinstance(task, TextTask):
        return []
    notes = task.tokenizer_notes(tokenizer)
    if not tokenizer.chat_template:
        return notes
    from trainer.tasks.text.answers import encoder_of_chats

    chats = encoder_of_chats()
    return [*notes, *(chats.column_notes(task.columns, train.rows, tokenizer) if chats else ())]


def _keeps_rows(recipe: Recipe, task: Task) -> bool:
    """Return whether each row of the source becomes one encoded row."""
    return task.keeps_rows and task.packer(recipe.data.max_length) is None


def _shown(split: Split, observer: Observer) -> Split:
    """Return the split, which reports its prepared rows to the observer."""
    observer.preparing(f"preparing {split.where}")
    return replace(split, show=partial(observer.preparing, f"preparing {split.where}"))
