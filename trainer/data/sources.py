"""Sources of rows: the hub, a local folder with the same structure, files, or a saved `DatasetDict`.

Only the readers of `datasets` run; `datasets` no longer supports code that comes with a data set.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trainer.base.errors import DataError, TrainerError, UsageError
from trainer.recipe.schema import FileData, FolderData, HubData

if TYPE_CHECKING:
    from datasets import Dataset

Format = Literal["json", "csv", "parquet"]

_FORMAT_OF_ENDING: dict[str, Format] = {
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".parquet": "parquet",
}


_LONGEST_REASON = 400  # maximum length of a reader's message, in characters


@dataclass(frozen=True)
class Split:
    """The rows of one split, and its name in messages."""

    rows: Dataset
    where: str


@dataclass(frozen=True)
class Splits:
    """The training split and the validation split."""

    train: Split
    validation: Split | None


def load_splits(data: HubData | FileData | FolderData) -> Splits:
    """Load the splits that `data` names.

    Raises:
        DataError: a split, file or folder is missing, is empty, or has the wrong format.
        TrainerError: the hub cannot be reached.
    """
    with _quiet_datasets():
        match data:
            case HubData():
                return _named_splits(_load_hub(data), data, _hub_name(data))
            case FolderData():
                return _named_splits(_load_folder(data), data, f"`{data.path}`")
            case FileData():
                return _load_files(data)


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
    validation = data.validation and _named_split(splits, data.validation, "data.validation", source)
    return Splits(train, validation or None)


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
            f" {_reason(error)}; check the spelling, and for a gated data set the access of your hub token"
        ) from error
    except ConnectionError as error:
        raise TrainerError(
            f"`data.name` is `{data.name}`, which is no local folder and not in the hub's cache, and the hub cannot be"
            " reached; set `data.name` to a local copy of the data set, or fetch it where there is a network"
            " and copy the hub's cache folder (HF_HOME)"
        ) from error
    except Exception as error:  # readers raise any type; for an unknown subset the message lists the subsets
        raise DataError(
            f"`data.name` and `data.subset` must name a data set, but {_hub_name(data)} cannot be read:"
            f" {_reason(error)}"
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
            f" `{data.path}` cannot be read as one: {_reason(error)};"
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
    train, validation = _paths(data.train), _paths(data.validation)
    for key, paths in (("data.train", train), ("data.validation", validation)):
        _require_files(paths, key)
    file_format = data.format or _common_format([*train, *validation])
    return Splits(
        _load_file_split(train, file_format, "data.train"),
        _load_file_split(validation, file_format, "data.validation") if validation else None,
    )


def _paths(value: str | Sequence[str] | None) -> list[Path]:
    return [Path(path) for path in ([value] if isinstance(value, str) else value or [])]


def _require_files(paths: Sequence[Path], key: str) -> None:
    for path in paths:
        if not path.is_file():
            what = "is a folder" if path.is_dir() else "does not exist"
            raise DataError(f"`{key}` must name files, but `{path}` {what}")
        if not os.access(path, os.R_OK):
            raise DataError(f"`{key}` must name files that can be read, but `{path}` denies it")


def _common_format(paths: Sequence[Path]) -> Format:
    """Return the common format of all file name endings.

    Raises:
        UsageError: an ending is unknown, or there are several formats.
    """
    formats = {path: _FORMAT_OF_ENDING.get(path.suffix.lower()) for path in paths}
    for path, file_format in formats.items():
        if file_format is None:
            raise UsageError(
                f"`data.format` must be set where the ending does not tell it, but is null and a file is `{path.name}`;"
                f" known endings are {', '.join(_FORMAT_OF_ENDING)}"
            )
    first, *others = formats.items()
    for path, file_format in others:
        if file_format != first[1]:
            raise UsageError(
                f"`data.train` and `data.validation` must be files of one format, but `{first[0].name}` is {first[1]}"
                f" and `{path.name}` is {file_format}; convert one, or set `data.format` if an ending is wrong"
            )
    assert first[1] is not None
    return first[1]


def _load_file_split(paths: Sequence[Path], file_format: Format, key: str) -> Split:
    import datasets

    where = ", ".join(f"`{path}`" for path in paths)
    for path in paths:
        if not path.stat().st_size:
            raise DataError(f"`{key}` must hold at least one row, but `{path}` is empty")
    files = [str(path.absolute()) for path in paths]
    try:
        rows = datasets.load_dataset(file_format, data_files=files, split="train")
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        if "corresponds to no data" in str(error):  # the message of `datasets` for files without rows
            return _not_empty([], where, key)
        fault = _json_fault(paths) if file_format == "json" else None
        raise DataError(
            f"`{key}` must hold {file_format}, but {fault or f'{where} cannot be read: {_reason(error)}'}"
        ) from error
    return _not_empty(rows, where, key)


def _json_fault(paths: Sequence[Path]) -> str | None:
    """Describe the first JSON fault; None if every line is an object or the file is a list."""
    for path in paths:
        text = path.read_text(encoding="utf-8", errors="replace")
        lines = [text] if text.lstrip().startswith("[") else text.splitlines()
        for number, line in enumerate(lines, start=1):
            try:
                value = json.loads(line) if line.strip() else {}
            except json.JSONDecodeError as error:
                return f"line {number - 1 + error.lineno} of `{path}` is not JSON: {error.msg} at column {error.colno}"
            if not isinstance(value, dict | list):
                return f"line {number} of `{path}` is not a JSON object"
    return None


def _reason(error: BaseException) -> str:
    """Return the message of the first error in the chain, on one line: `datasets` wraps errors of its readers."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}..."
