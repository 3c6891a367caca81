"""Sources of rows: the hub, a local folder with the same structure, files, or a saved `DatasetDict`.

Only the readers of `datasets` run; `datasets` no longer supports code that comes with a data set.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.base.errors import DataError, TrainerError
from trainer.data.files import common_format, files_of, read_files, reason
from trainer.recipe.schema import FileData, FolderData, HubData

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class Split:
    """The rows of one split.

    Attributes:
        rows: the rows.
        where: the name of the split in messages.
        first_row: the number of the rows before it in its file.
        is_part: whether it is a part of a file to predict, which may hold no token that the tokenizer knows.
    """

    rows: Dataset
    where: str
    first_row: int = 0
    is_part: bool = False


@dataclass(frozen=True)
class Splits:
    """The training split, the validation split, and notes on their reading for the user."""

    train: Split
    validation: Split | None
    notes: tuple[str, ...] = ()


def load_splits(data: HubData | FileData | FolderData, label: str | None = None) -> Splits:
    """Load the splits that `data` names.

    Args:
        data: the section `data` of a recipe.
        label: the column of classes, of which a held-out share has as many as the rest; None: there is none.

    Raises:
        DataError: a split, file or folder is missing, is empty, or has the wrong format.
        TrainerError: the hub cannot be reached.
    """
    with _quiet_datasets():
        match data:
            case HubData():
                splits = _named_splits(_load_hub(data), data, _hub_name(data))
            case FolderData():
                splits = _named_splits(_load_folder(data), data, f"`{data.path}`")
            case FileData():
                splits = _load_files(data)
        if not isinstance(data.validation, float):
            return splits
        held_out = _hold_out(splits.train, data.validation, label)
        return replace(held_out, notes=(*splits.notes, *held_out.notes))


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


def _named_splits(splits: Mapping[str, Dataset], data: HubData | FolderData, source: str) -> Splits:
    train = _named_split(splits, data.train, "data.train", source)
    name = data.validation
    return Splits(train, _named_split(splits, name, "data.validation", source) if isinstance(name, str) else None)


def _named_split(splits: Mapping[str, Dataset], name: str, key: str, source: str) -> Split:
    if name not in splits:
        raise DataError(
            f"`{key}` must name a split of {source}, but is `{name}`; there are {', '.join(f'`{n}`' for n in splits)}"
        )
    return _not_empty(splits[name], f"split `{name}` of {source}", key)


def _not_empty(rows: Any, where: str, key: str) -> Split:
    if not len(rows):
        raise DataError(f"`{key}` must hold at least one row, but {where} is empty")
    return Split(rows, where)


def _hub_name(data: HubData) -> str:
    return f"`{data.name}`" + (f" (subset `{data.subset}`)" if data.subset else "")


def _load_hub(data: HubData) -> Mapping[str, Dataset]:
    import datasets

    try:
        splits: Mapping[str, Dataset] = datasets.load_dataset(data.name, data.subset, revision=data.revision)
    except datasets.exceptions.DatasetNotFoundError as error:
        raise DataError(
            f"`data.name` must name a data set on the hub or a local folder, but is `{data.name}`:"
            f" {reason(error)}; check the spelling, and for a gated data set the access of your hub token"
        ) from error
    except ConnectionError as error:
        raise TrainerError(
            f"`data.name` is `{data.name}`, which is no local folder and not in the hub's cache, and the hub cannot be"
            " reached; set `data.name` to a local copy of the data set, or fetch it where there is a network"
            " and copy the hub's cache folder (HF_HOME)"
        ) from error
    except Exception as error:  # readers raise any type; for an unknown subset the message lists the subsets
        raise DataError(
            f"`data.name` and `data.subset` must name a data set, but {_hub_name(data)} cannot be read: {reason(error)}"
        ) from error
    return splits


def _load_folder(data: FolderData) -> Mapping[str, Dataset]:
    import datasets

    if not Path(data.path).is_dir():
        raise DataError(f"`data.path` must be a folder, but there is none at `{data.path}`")
    try:
        loaded = datasets.load_from_disk(data.path)
    except Exception as error:  # of any type: a saved split without rows raises IndexError
        raise DataError(
            "`data.path` must be a folder that `DatasetDict.save_to_disk` wrote, each split with a row, but"
            f" `{data.path}` cannot be read as one: {reason(error)};"
            ' for a folder of JSON, CSV or Parquet files use `data.source` "files" or "hub"'
        ) from error
    if not isinstance(loaded, datasets.DatasetDict):
        raise DataError(
            f"`data.path` must be a folder that `DatasetDict.save_to_disk` wrote, but `{data.path}` holds a single"
            ' split; save it as `DatasetDict({"train": split})`'
        )
    splits: Mapping[str, Dataset] = loaded
    return splits


def _load_files(data: FileData) -> Splits:
    names = data.validation if not isinstance(data.validation, float) else None
    train, validation = files_of(data.train, "data.train"), files_of(names, "data.validation")
    file_format = data.format or common_format([*train, *validation])
    notes: list[str] = []

    def load(paths: Sequence[Path], key: str) -> Split:
        rows, found = read_files(paths, file_format, data.delimiter, data.encoding, key)
        notes.extend(found)
        return _not_empty(rows or [], ", ".join(f"`{path}`" for path in paths), key)

    own = load(validation, "data.validation") if validation else None
    return Splits(load(train, "data.train"), own, tuple(notes))


def _hold_out(train: Split, share: float, label: str | None) -> Splits:
    """Split rows off for validation: of each class its share, if `label` names a column of classes.

    The choice depends on the rows' places only, and not on the recipe's seed, so that runs can be compared.

    Raises:
        DataError: there are too few rows.
    """
    num_rows = len(train.rows)
    number = round(share * num_rows)
    if not 0 < number < num_rows:
        raise DataError(
            f"`data.validation` is {share}, but {train.where} has {num_rows} rows, of which {number} would be held out;"
            " use a share that leaves rows for both, or a split of its own"
        )
    order = np.random.default_rng(0).permutation(num_rows)
    values = train.rows[label][:] if label in train.rows.features else []
    if values and isinstance(values[0], str | int) and len(set(values)) <= number:
        # Rows of one class stand together, so that every 1/share-th row is of each class in turn.
        place = {value: index for index, value in enumerate(sorted(set(values), key=str))}
        order = order[np.argsort([place[values[row]] for row in order], kind="stable")]
        taken = np.floor((np.arange(number) + 0.5) / number * num_rows).astype(np.int64)
    else:
        taken = np.arange(number)
    held = np.isin(np.arange(num_rows), order[taken])
    note = f"validation: {number:,} of the {num_rows:,} rows of {train.where} are held out"
    return Splits(
        Split(train.rows.select(np.flatnonzero(~held)), train.where),
        Split(train.rows.select(np.flatnonzero(held)), f"the held-out rows of {train.where}"),
        (note,),
    )
