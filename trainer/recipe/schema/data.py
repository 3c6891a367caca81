"""The section `data`, one class for each source."""

from __future__ import annotations

import codecs
import glob
import json
import os
from collections.abc import Iterator
from datetime import date
from difflib import get_close_matches
from encodings.aliases import aliases
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from trainer.base.disk import FOLDER_FIX, no_file
from trainer.recipe.paths import KeyPath, is_url, shown_value
from trainer.recipe.schema.fields import HeldOut, HubOrPathField, Name, PathField, Revision
from trainer.recipe.schema.section import Contradiction, Section, clash, hub_or_folder, missing_folder

_OF_PARTS = ("idna", "punycode", "raw-unicode-escape", "undefined", "unicode-escape")
"""Codecs of names of hosts and of Python's literals, which change texts in files."""
_OTHER_NAMES = {"ansi": "cp1252"}  # of editors on Windows


class DataKeys(Section):
    """Keys of all sources."""

    max_length: int = Field(128, ge=1)
    """Maximum tokens of a text; longer ones are truncated, with a note. Texts of `causal_lm` and packed rows read this
    many tokens and continue in the next row."""
    group_by_length: bool = False
    """Batch texts of similar length, for less padding."""
    pad_to: int = Field(1, ge=1)
    """Pad microbatches to a multiple of this many tokens, such as 8 or 64."""
    padding_free: bool = False
    """Compute the layers without padding, with equal results."""
    num_workers: int = Field(0, ge=0, le=64)
    """Processes per rank that prepare batches; 0: the rank itself."""
    preparation_processes: Annotated[int, Field(ge=1, le=256)] | None = None
    """Processes of a node that tokenise a split; null: its cores, fewer for little text."""
    cache: PathField | None = None
    """Folder for prepared rows, such as tokenised texts; null: the user's cache."""
    date: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")] | None = None
    """Date that a chat template writes as today's, such as 2026-01-31; null: the day of the first start of the run."""

    @property
    def source_weights(self) -> list[float] | None:
        """The weights of the sources of a mixture; None: an epoch has every row once."""
        return None

    def contradictions(self) -> Iterator[Contradiction]:
        try:
            date.fromisoformat(self.date or "2000-01-01")
        except ValueError:
            yield clash(f"must be a date such as 2026-01-31, but is {shown_value(self.date)}", "data.date")


class HubData(DataKeys):
    """A data set on the hub, or a local folder with the same structure."""

    source: Literal["hub"]
    name: HubOrPathField
    """A name on the hub, or a local folder that `datasets.load_dataset` can read."""
    subset: Name | None = None
    """Configuration of the data set, such as `mrpc` of GLUE."""
    revision: Revision = None
    train: Name = "train"
    """Name of the training split."""
    validation: HeldOut | Name | None = "validation"
    """Name of the validation split, or the share of `train` to hold out."""

    def contradictions(self) -> Iterator[Contradiction]:
        yield from super().contradictions()
        yield from hub_or_folder("data.name", self.name, self.revision)


class FileData(DataKeys):
    """Files of rows, such as JSON Lines, CSV or Parquet, also compressed by gzip.

    Empty lines of JSON Lines and CSV files are skipped. Texts and names of classes in CSV files stay as they are
    written, such as 007. Files to predict are read with the same `delimiter`, `quotes` and `encoding`.
    """

    source: Literal["files"]
    format: str | None = Field(None, description="null: by the first file's ending.")
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] | None = None
    """Character between the columns of CSV files; null: found in their first lines."""
    quotes: bool = True
    """Quotation marks enclose values of CSV and TSV files; false: they are text."""
    encoding: Name = "utf-8"
    """Encoding of text files, such as latin-1."""
    train: PathField | Annotated[list[PathField], Field(min_length=1)]
    """File or files of the training split, or a pattern such as `part-*.jsonl`."""
    mixture: list[Annotated[float, Field(gt=0)]] | None = None
    """Share of each entry of `train` in an epoch, such as [0.7, 0.3]; null: every row once."""
    validation: HeldOut | PathField | Annotated[list[PathField], Field(min_length=1)] | None = None
    """File or files of the validation split, or the share of `train` to hold out, such as 0.1."""

    @property
    def source_weights(self) -> list[float] | None:
        return self.mixture

    def contradictions(self) -> Iterator[Contradiction]:
        yield from super().contradictions()
        if problem := _encoding_problem(self.encoding):
            yield clash(problem, "data.encoding")
        yield from _missing_files("train", self.train)
        yield from _missing_files("validation", self.validation)
        number = len(self.train) if isinstance(self.train, list) else 1
        if self.mixture is not None and (number == 1 or len(self.mixture) != number):
            entries = f"{number} entries; give each one weight"
            if number == 1:
                entries = "one entry; list at least two files or patterns there"
            text = f"has the weights {self.mixture}, but `data.train` has {entries}"
            yield clash(text, "data.mixture", "data.train")


class FolderData(DataKeys):
    """A folder that `save_to_disk` of `datasets` wrote; one without named splits is the split `train`."""

    source: Literal["folder"]
    path: PathField
    """The folder."""
    train: Name = "train"
    """Name of the training split."""
    validation: HeldOut | Name | None = "validation"
    """Name of the validation split, or the share of `train` to hold out."""

    def contradictions(self) -> Iterator[Contradiction]:
        yield from super().contradictions()
        yield from missing_folder("data.path", self.path)


Data = HubData | FileData | FolderData


def _encoding_problem(name: str) -> str | None:
    """Return the problem of a name that is no encoding of texts."""
    if _is_encoding(name):
        return None
    others = {**aliases, **_OTHER_NAMES}
    near = get_close_matches(name.lower().replace("-", "_"), others, 1)
    likely = others[near[0]].replace("_", "-") if near else ""
    fix = f"did you mean {likely}?" if near and _is_encoding(likely) else "examples are utf-8, utf-16 and cp1252"
    return f"must be an encoding of texts that Python has, but is {shown_value(name)}; {fix}"


def _is_encoding(name: str) -> bool:
    try:
        "a".encode(name)  # refuses base64, rot13 and others that do not turn texts into bytes
        return codecs.lookup(name).name not in _OF_PARTS
    except (LookupError, ValueError):
        return False


def _missing_files(split: str, places: float | str | list[str] | None) -> Iterator[Contradiction]:
    for index, place in enumerate(places if isinstance(places, list) else [places]):
        if not isinstance(place, str) or os.path.isfile(place) or is_url(place):
            continue
        path: KeyPath = ("data", split, index) if isinstance(places, list) else ("data", split)
        if not glob.has_magic(place):
            text = f"is a file that does not exist: {place}"
            if len(names := place.split(",")) > 1:
                text += f"; several files are a list: {json.dumps([os.path.basename(name.strip()) for name in names])}"
            if os.path.exists(place):
                text = f"must name files, but `{place}` {no_file(Path(place))}"
                text += FOLDER_FIX if os.path.isdir(place) else "; copy its rows to a file"
            yield Contradiction((path,), text, is_missing_data=True)
        elif not glob.glob(place, recursive=True):
            yield Contradiction((path,), f"is a pattern that no file matches: {place}", is_missing_data=True)
