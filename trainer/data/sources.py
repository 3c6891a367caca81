"""Sources of rows: the hub, a local folder with the same structure, files, or a saved `DatasetDict`.

Only the readers of `datasets` run; `datasets` no longer supports code that comes with a data set.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import re
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trainer.base.errors import DataError, Problems, RecipeError
from trainer.base.file_formats import file_formats
from trainer.base.text import listed
from trainer.data.formats.base import CellKind, Files, TextOptions, json_chats, reason
from trainer.data.formats.table import reader_of
from trainer.data.readers import (
    RowPlaces,
    common_format,
    files_of,
    is_large,
    read_files,
    reading,
)
from trainer.data.row_transform import RowTransform, transform_of
from trainer.recipe.schema import Data, FileData, FolderData, HubData

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class Split:
    """The rows of one split.

    Attributes:
        first_row: the number of the rows before it in its file.
        is_part: whether it is a part of a file to predict, which may hold no token that the tokenizer knows.
        is_whole: whether it has all rows of its source.
        places: the places of the rows in text files; None: they have no lines.
        show: gets the number of rows that are prepared, and of all rows.
        sources: the number of rows of each source of a mixture; empty: there is one source.
        folders: the folders in which rows may name image files.
        transform: made the rows, and could leave some out; None: there is none for these rows alone.
    """

    rows: Dataset
    where: str
    first_row: int = 0
    is_part: bool = False
    is_whole: bool = True
    places: RowPlaces | None = None
    show: Callable[[int, int], None] | None = None
    sources: tuple[int, ...] = ()
    folders: tuple[Path, ...] = ()
    transform: RowTransform | None = None

    @contextlib.contextmanager
    def explains_rows(self) -> Iterator[None]:
        """Add to each row that an error of the block names its line, if it differs, and how to leave it out.

        Raises:
            DataError, RecipeError: the error of the block.
        """
        try:
            yield
        except (DataError, RecipeError) as error:
            if self.places is None and self.transform is None:
                raise
            messages = error.problems if isinstance(error, RecipeError) else (str(error),)
            raise type(error)(*map(self._explained, messages)) from error

    def _explained(self, message: str) -> str:
        def with_line(row: re.Match[str]) -> str:
            with contextlib.suppress(OSError, UnicodeError, csv.Error, IndexError):
                if self.places is not None and (place := self.places.of(int(row[1]) - 1)):
                    return f"{row[0]} ({place})"
            return row[0]

        fix = self._fix(message)
        message = re.sub(rf"\brow (\d+)(?= of {re.escape(self.where)}|(, row \d+)*( and.*)?\)$)", with_line, message)
        return f"{message}; {fix}" if fix else message

    def _fix(self, message: str) -> str | None:
        """Return how to leave out the row of a message on a null or a blank text; None: it is on another fault."""
        cell = re.match(rf"column `(.+?)`, row (\d+) of {re.escape(self.where)} ", message)
        if self.transform is None or cell is None or cell[1] not in self.rows.column_names:
            return None
        # Not as Python objects, which would open an image.
        value = self.rows.select_columns([cell[1]]).with_format("arrow")[int(cell[2]) - 1].column(0)[0].as_py()
        is_text = isinstance(value, str) and (not value.strip() or "must be a finite number" in message)
        return self.transform.fix(cell[1], value) if value is None or value != value or is_text else None

    def first(self, number: int | None) -> Split:
        """Return the split with its first rows only; None: with all."""
        if number is None or len(self.rows) <= number:
            return self
        return replace(self, rows=self.rows.select(range(number)), is_whole=False, sources=())


def require_one_type(split: Split, columns: Sequence[str]) -> None:
    """Require values of one type in columns of texts or numbers.

    Raises:
        DataError: a column holds several types; the message names the first row of another type than before.
    """
    for name in columns:
        if type(split.rows.features.get(name)).__name__ != "Json":  # the type of mixed values
            continue
        first: object = None
        for row, value in enumerate(split.rows[name]):
            if value is None or isinstance(value, list | dict):
                continue
            if first is None:
                first = value
            elif type(value) is not type(first):
                with split.explains_rows():
                    raise DataError(
                        f"column `{name}`, row {row + 1} of {split.where} is {value!r}, and {first!r} before it has"
                        " another type; write all values alike"
                    )


@dataclass(frozen=True)
class Splits:
    """The training split, the validation split, and notes on their reading for the user."""

    train: Split
    validation: Split | None
    notes: tuple[str, ...] = ()


def load_splits(
    data: Data,
    label: str | None = None,
    most_rows: int | None = None,
    problems: Problems | None = None,
    columns: Sequence[str] = (),
    kinds: Mapping[str, CellKind] | None = None,
    read_train: Callable[[Sequence[str]], Split] | None = None,
) -> Splits:
    """Load the splits that `data` names.

    Args:
        label: the column of classes; a held-out share has each class in its proportion; None: there is none.
        most_rows: the number of rows to read of large files; None: all.
        problems: collects the errors of the validation split, which is then None; None: they are raised.
        columns: the columns that the task reads, by which known shapes of rows are recognised.
        kinds: the kinds of those of the columns that must not become numbers.
        read_train: reads the training split of files for `columns`, before its map; None: its files are read whole.

    Raises:
        DataError: a split, file or folder is missing, is empty, or has the wrong format.
        RecipeError: this holds for both splits.
        TrainerError: the hub cannot be reached.
    """
    collected = Problems() if problems is None else problems
    loading = _Loading(columns, kinds or {}, collected, transform_of(data))
    with _quiet_datasets():
        if isinstance(data, FileData):
            loading.read_files(data, most_rows, read_train)
        else:
            loading.take_named(data)
        if problems is None or "data.train" not in loading.splits:
            collected.raise_all()
        train, notes = loading.splits["data.train"], tuple(loading.notes)
        if not isinstance(data.validation, float) or not train.is_whole:
            return Splits(train, loading.splits.get("data.validation"), notes)
        held_out = _hold_out(train, data.validation, label)
        return replace(held_out, notes=(*notes, *held_out.notes))


@contextlib.contextmanager
def _quiet_datasets() -> Iterator[None]:
    """Disable the progress bars of `datasets`, which disturb those of the run, and its log, which repeats errors."""
    import datasets

    shown, verbosity = not datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(verbosity)
        if shown:
            datasets.enable_progress_bars()


@dataclass
class _Loading:
    """The splits of a recipe by their keys, with notes for the user. Problems of one split leave the other."""

    columns: Sequence[str]
    kinds: Mapping[str, CellKind]
    problems: Problems
    transform: RowTransform
    splits: dict[str, Split] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def take_named(self, data: HubData | FolderData) -> None:
        """Load the splits of a data set that has names for them."""
        from trainer.data.named_splits import load_named  # files need no `datasets` with names

        named, name, folders = load_named(data, self.transform.kinds(self.kinds))
        for key, wanted in (("data.train", data.train), ("data.validation", data.validation)):
            with self.problems.collect():
                if not isinstance(wanted, str):
                    continue
                if wanted not in named:
                    names = ", ".join(f"`{split}`" for split in named)
                    raise DataError(f"`{key}` must name a split of {name}, but is `{wanted}`; there are {names}")
                split = replace(_not_empty(named[wanted], f"split `{wanted}` of {name}", key), folders=folders)
                self.splits[key] = self._transformed(split, self.transform)
        others = [f"`{split}`" for split in named if split != data.train]
        if isinstance(data.validation, float) and others:
            of_name = f"other splits of {name}: {listed(others, 6)}"
            self.notes.append(f"`data.validation` is a share of `{data.train}`; {of_name}")

    def read_files(
        self, data: FileData, most_rows: int | None, read_train: Callable[[Sequence[str]], Split] | None
    ) -> None:
        """Read files; the arguments are those of `load_splits`."""
        names: dict[str, Any] = {"data.train": data.train, "data.validation": data.validation}
        if read_train is not None:
            del names["data.train"]
            with self.problems.collect():
                self.splits["data.train"] = self._transformed(read_train(self.columns), self.transform)
        files: dict[str, list[Path]] = {}
        for key, named in names.items():
            with self.problems.collect(), reading(key):
                files[key] = files_of(named if not isinstance(named, float) else None, key)
        all_paths = [path for paths in files.values() for path in paths]
        # Files of both splits decide the format together.
        with self.problems.collect():
            file_format = data.format or (common_format(all_paths) if all_paths else "json")
            for name, row in file_formats().items():
                if all_paths and file_format != name and (keys := data.changed(*row.keys)):
                    problem = f"is for {row.shown} files, but `{all_paths[0]}` is read as {file_format}"
                    raise DataError(f"`data.{keys[0]}` {problem}; remove it")
            for key, paths in files.items():
                if paths:
                    with self.problems.collect(), reading(key):
                        self.splits[key] = self._read(data, file_format, key, paths, most_rows)

    def _read(self, data: FileData, file_format: str, key: str, paths: list[Path], most_rows: int | None) -> Split:
        bound, text = most_rows if is_large(paths) else None, text_options(data)
        if twice := [path for path in dict.fromkeys(paths) if paths.count(path) > 1]:
            self.notes.append(f"`{key}` names `{twice[0]}` more than once, so its rows are there more than once")
        entries = self._entries(data, key, paths, bound)
        read = [self._read_entry(file_format, Files(of_entry, text, key, bound)) for of_entry, _ in entries]
        of_sources = [transform.kinds(self.kinds) for _, transform in entries]
        # All entries together, because a column must have one type in all of them.
        typed = reader_of(file_format).typed([split.rows for split in read], dict(ChainMap(*of_sources)))
        mapped = [
            self._transformed(replace(split, rows=rows), transform)
            for split, rows, (_, transform) in zip(read, typed, entries, strict=True)
        ]
        return mapped[0] if len(mapped) == 1 else _joined(read, mapped, self.columns, key, data.mixture is not None)

    def _entries(
        self, data: FileData, key: str, paths: list[Path], bound: int | None
    ) -> list[tuple[list[Path], RowTransform]]:
        """Return the parts of a split that are read apart: their files, and the transform of their rows."""
        of_entries = self.transform.of_entries(data) if key == "data.train" else None
        if of_entries is None and (key != "data.train" or data.mixture is None or bound is not None):
            return [(paths, self.transform)]
        named = [data.train] if isinstance(data.train, str) else data.train
        transforms = [self.transform] * len(named) if of_entries is None else of_entries
        return [(files_of(entry, key), of_entry) for entry, of_entry in zip(named, transforms, strict=True)]

    def _read_entry(self, file_format: str, files: Files) -> Split:
        """Return the rows of files; see `read_files` of `readers`."""
        rows, notes = read_files(file_format, files)
        split = replace(
            _not_empty(rows or [], ", ".join(f"`{path}`" for path in files.paths), files.key),
            places=RowPlaces(tuple(files.paths), file_format, files.text),
            folders=tuple(dict.fromkeys(path.parent for path in files.paths)),
        )
        with split.explains_rows():
            format_notes = reader_of(file_format).notes(split.rows, files.paths[0], files.text, split.where)
        self.notes += [*notes, *format_notes]
        # With exactly `most_rows` rows, the files may have more.
        return replace(split, is_whole=files.most_rows is None or len(split.rows) < files.most_rows)

    def _transformed(self, split: Split, transform: RowTransform) -> Split:
        """Return a split with the rows of the task.

        Raises:
            DataError: a column is missing, a value cannot be used, or no row is left.
        """
        with split.explains_rows():
            rows, chosen, notes = transform.whole(split.rows, self.columns, split.where)
        self.notes += notes
        split = replace(split, rows=rows, transform=transform)
        if chosen is None:
            return split
        places = replace(split.places, chosen=chosen) if split.places else None
        return replace(split, where=f"the filtered rows of {split.where}", places=places)


def _not_empty(rows: Any, where: str, key: str) -> Split:
    if not len(rows):
        raise DataError(f"`{key}` must hold at least one row, but {where} is empty; name other rows")
    return Split(rows, where)


def text_options(data: Data) -> TextOptions:
    """Return how the text files of a recipe are read."""
    if not isinstance(data, FileData):
        return TextOptions()
    keys = [key for row in file_formats().values() for key in row.keys]
    further = {key: getattr(data, key) for key in keys}
    return TextOptions(codecs.lookup(data.encoding).name, data.delimiter, data.quotes, further)


def _joined(read: Sequence[Split], mapped: Sequence[Split], columns: Sequence[str], key: str, is_mixed: bool) -> Split:
    """Return the rows of several entries as one split.

    Args:
        read: the entries, as they are in their files.
        mapped: the same, with the rows of the task.
        columns: the columns that the task reads; others are left out, if entries have other ones.
        is_mixed: whether they are the sources of a mixture.

    Raises:
        DataError: entries have other columns, or values of other types.
    """
    parts = _with_same_columns(mapped, columns, key)
    joined = _concatenated(parts, " and ".join(split.where for split in mapped), key)
    # Of the unmapped rows: places count the rows of the files, also those that a map left out.
    starts = np.cumsum([0, *(len(split.rows) for split in read)])
    chosen: list[NDArray[np.int64]] = []
    paths: list[Path] = []
    for start, split in zip(starts, mapped, strict=False):
        assert split.places is not None
        paths += split.places.paths
        numbers = split.places.chosen
        chosen.append(start + (np.arange(len(split.rows)) if numbers is None else numbers))
    transforms = [split.transform for split in mapped]
    places, is_whole = read[0].places, all(split.is_whole for split in read)
    assert places is not None
    return Split(
        joined,
        ", ".join(split.where for split in mapped),
        places=replace(places, paths=tuple(paths), chosen=np.concatenate(chosen)),
        is_whole=is_whole,
        # A part of the rows cannot tell the sizes of the sources.
        sources=tuple(map(len, parts)) if is_mixed and is_whole else (),
        folders=tuple(folder for split in read for folder in split.folders),
        transform=transforms[0] if transforms.count(transforms[0]) == len(transforms) else None,
    )


def _with_same_columns(mapped: Sequence[Split], columns: Sequence[str], key: str) -> list[Dataset]:
    """Return the rows of entries; if their columns differ, those that the task reads."""
    parts = [split.rows for split in mapped]
    if len({tuple(sorted(rows.column_names)) for rows in parts}) > 1 and columns:
        parts = [rows.select_columns([name for name in columns if name in rows.column_names]) for rows in parts]
    first = parts[0]
    for split, rows in zip(mapped[1:], parts[1:], strict=True):
        if set(rows.column_names) != set(first.column_names):
            here, there = (", ".join(part.column_names) for part in (first, rows))
            raise DataError(
                f"`{key}` must name files with the same columns, but {mapped[0].where} has {here} and {split.where} has"
                f" {there}; rename columns by `data.maps`, or in the files"
            )
    return parts


def _concatenated(parts: Sequence[Dataset], names: str, key: str) -> Dataset:
    """Return all rows, with the types of the first part; messages with keys of their own do not become others."""
    import datasets
    import pyarrow

    types = [rows.features for rows in parts]  # each a copy of all columns
    features = types[0].copy()
    for name in features:
        features[name] = next((kinds[name] for kinds in types if kinds[name] == json_chats()), features[name])
    try:
        alike = [rows if rows.features == features else rows.cast(features) for rows in parts]
        joined: Dataset = datasets.concatenate_datasets(alike)
    except (TypeError, ValueError, pyarrow.ArrowException) as error:
        raise DataError(
            f"`{key}` must name files with values of the same types in a column, but {names} differ: {reason(error)};"
            " write the values alike"
        ) from error
    return joined


def _hold_out(train: Split, share: float, label: str | None) -> Splits:
    """Split rows off for validation: of each class its share, if `label` names a column of fewer classes.

    The choice depends on the rows' places only, and not on the recipe's seed, so that runs can be compared.

    Raises:
        DataError: there are too few rows.
    """
    num_rows = len(train.rows)
    number = round(share * num_rows)
    if not 0 < number < num_rows:
        raise DataError(
            f"`data.validation` is {share}, but {train.where} has {num_rows} rows, and {number} would be held out;"
            " use a share that leaves rows for both, or a split of its own"
        )
    # A fixed seed: runs with other seeds must hold out the same rows, or their metrics could not be compared.
    order = np.random.default_rng(0).permutation(num_rows)
    values = train.rows[label][:] if label in train.rows.features else []
    is_class = bool(values) and isinstance(values[0], str | int)
    if is_class and number < len(set(values)) < num_rows:
        # The last row of a class stays, because the training split must have the class.
        first = {values[row]: row for row in reversed(order)}
        order = np.array(sorted(order, key=lambda row: first[values[row]] == row))
    if is_class and len(set(values)) <= number:
        # Rows of one class stand together, so that every 1/share-th row is of each class in turn.
        place = {value: index for index, value in enumerate(sorted(set(values), key=str))}
        order = order[np.argsort([place[values[row]] for row in order], kind="stable")]
        taken = np.floor((np.arange(number) + 0.5) / number * num_rows).astype(np.int64)
    else:
        taken = np.arange(number)
    held = np.isin(np.arange(num_rows), order[taken])
    note = f"validation: {number:,} of the {num_rows:,} rows of {train.where} are held out".replace("rows of the ", "")

    def part(rows: NDArray[np.bool_], where: str) -> Split:
        chosen = np.flatnonzero(rows)
        places = replace(train.places, chosen=chosen) if train.places else None
        # The rows of a source stay consecutive, so its new size is the number of chosen rows before its end.
        ends = np.searchsorted(chosen, np.cumsum(train.sources))
        sources = tuple(int(number) for number in np.diff(ends, prepend=0)) if train.sources else ()
        return replace(train, rows=train.rows.select(chosen), where=where, places=places, sources=sources)

    return Splits(
        part(~held, f"the training rows of {train.where}"), part(held, f"the held-out rows of {train.where}"), (note,)
    )
