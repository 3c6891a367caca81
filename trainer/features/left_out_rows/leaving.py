"""Leave the training rows out that CSV files name."""

from __future__ import annotations

import csv
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from trainer.base.errors import DataError
from trainer.data.hashing import row_digest
from trainer.data.sources import Split, Splits
from trainer.features.left_out_rows.section import files_of
from trainer.recipe.schema import Recipe


def leave_out(recipe: Recipe, splits: Splits) -> Splits:
    """Return the splits without the training rows that the files of the recipe name.

    Raises:
        DataError: a file cannot be read, or names no row, or a row that is not there or has changed.
    """
    train, notes = splits.train, splits.notes
    for file in files_of(recipe.data):
        where, before = train.where, len(train.rows)
        train = _without(train, file)
        notes = (*notes, f"{before - len(train.rows):,} of {before:,} rows of {where} are left out by {file}")
    return replace(splits, train=train, notes=notes)


def _without(train: Split, file: str) -> Split:
    rows = _rows_of(file)
    number = len(train.rows)
    is_kept: NDArray[np.bool_] = np.ones(number, bool)
    for row, digest in rows.items():
        if row >= number:
            if train.is_whole:
                raise DataError(
                    f"`data.leave_out` names row {row + 1} in {file}, but {train.where} has {number:,} rows; audit"
                    " these data again"
                )
            continue  # a check reads the first rows only
        if digest and row_digest(train.rows[row]) != digest:
            raise DataError(
                f"`data.leave_out` must name rows of these data, but row {row + 1} of {train.where} is another one than"
                f" {file} was written for; audit these data again"
            )
        is_kept[row] = False
    if not is_kept.any():
        raise DataError(f"`data.leave_out` must leave a row, but {file} names all rows of {train.where}; shorten it")
    kept = np.flatnonzero(is_kept)
    places = train.places
    if places is not None:
        places = replace(places, chosen=kept if places.chosen is None else places.chosen[kept])
    # The rows of a source stay consecutive.
    sizes = np.diff(np.searchsorted(kept, np.cumsum(train.sources)), prepend=0) if train.sources else ()
    return replace(
        train,
        rows=train.rows.select(kept),
        where=f"the rows of {train.where} that {file} leaves",
        places=places,
        sources=tuple(map(int, sizes)),
    )


def _rows_of(file: str) -> dict[int, str]:
    """Return the digest of each row that a file names, by its number from 0; empty: any row."""
    found: dict[int, str] = {}
    try:
        with open(file, encoding="utf-8-sig", newline="") as lines:
            reader = csv.DictReader(lines)
            if "row" not in (reader.fieldnames or ()):
                raise DataError(
                    f"`data.leave_out` must name CSV files with a column `row`, but {file} has none; add it"
                )
            for line in reader:
                if line.get("split") in (None, "", "training"):
                    row = int(line["row"])
                    if row < 1:
                        raise ValueError(f"row {row} is below 1")
                    found[row - 1] = line.get("digest") or ""
    except (OSError, ValueError, TypeError, csv.Error) as error:
        raise DataError(f"`data.leave_out` names {file}, which cannot be read: {error}; correct it") from error
    return found
