"""Rows of token ids that another program wrote, perhaps with an attention mask and labels."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.base.errors import DataError
from trainer.parallel.microbatch import IGNORED_LABEL
from trainer.tasks.text.columns import cell, dtype_in_list
from trainer.tasks.types import Dataset

MASK, LABELS = "attention_mask", "labels"
"""The columns beside token ids that are read, under the names of transformers."""
TRAINED = ("completion_mask", "assistant_masks", "loss_mask")
"""Columns beside token ids that are 1 for the trained tokens, under the names of TRL and Megatron."""


def holds_ids(feature: Any) -> bool:
    """Return whether a column holds lists of integers."""
    return (dtype_in_list(feature) or "").lstrip("u").startswith("int")


def columns_of_ids(features: Any, *names: str) -> tuple[str, ...]:
    """Return those of the columns that a split has, with lists of integers."""
    return tuple(name for name in names if holds_ids(features.get(name)))


def read_ids(
    rows: Dataset, column: str, beside: Sequence[str], num_tokens: int | None, where: str, first_row: int
) -> list[tuple[list[int], list[int] | None]]:
    """Return the ids of each row without padding, and a label for each, if a column holds or restricts them.

    Args:
        beside: the columns beside that of the ids, of `MASK`, `LABELS` and `TRAINED`.
        num_tokens: the number of tokens that the model knows; None: unknown.

    Raises:
        DataError: a token is unknown to the model; a mask has gaps, or its length or that of the labels differs.
    """
    if not beside and (rows_of_ids := _valid(rows, column, num_tokens)) is not None:
        return [(ids, None) for ids in rows_of_ids]
    pairs: list[tuple[list[int], list[int] | None]] = []
    names = (column, *beside)
    for row, values in enumerate(zip(*(rows[name] for name in names), strict=True), first_row):
        read = _visible(_arrays(names, values, where, row), where, row)
        for name in TRAINED:
            if name in read:
                read[LABELS] = _trained(read.pop(name), read.get(LABELS, read[column]), name, where, row)
        for name, array in read.items():
            _require_known(array, name, name == column, num_tokens, where, row)
        pairs.append((read[column].tolist(), read[LABELS].tolist() if LABELS in read else None))
    return pairs


def _valid(rows: Dataset, column: str, num_tokens: int | None) -> list[list[int]] | None:
    """Return the ids of all rows without a loop over their tokens; None: one is not valid."""
    import pyarrow.compute as arrow

    lists = rows.select_columns([column]).with_format("arrow")[:].column(0)
    flat = arrow.list_flatten(lists)
    if lists.null_count or flat.null_count:
        return None
    ids = flat.to_numpy().astype(np.int64, copy=False)
    if ids.min(initial=0) < 0 or (num_tokens is not None and ids.max(initial=-1) >= num_tokens):
        return None
    ends, values = np.cumsum(arrow.list_value_length(lists).to_numpy()).tolist(), ids.tolist()
    return [values[start:end] for start, end in pairwise([0, *ends])]


_Columns = dict[str, NDArray[np.int64]]
"""The numbers of the tokens of a row, by column, each `[tokens]`."""


def _arrays(names: Sequence[str], values: Sequence[Any], where: str, row: int) -> _Columns:
    for name, value in zip(names, values, strict=True):
        place = cell(name, row, where)
        if value is None or None in value:
            raise DataError(f"{place} {'is' if value is None else 'holds'} null; fill it, or leave the row out")
        if len(value) != len(values[0]):
            raise DataError(
                f"{place} must have a number for each of {len(values[0])} tokens, but has {len(value)}; correct it"
            )
    return {name: np.asarray(value, np.int64) for name, value in zip(names, values, strict=True)}


def _visible(read: _Columns, where: str, row: int) -> _Columns:
    """Return the numbers of the tokens that the mask of the row does not hide, without the mask."""
    mask = read.pop(MASK, None)
    if mask is None:
        return read
    kept = np.flatnonzero(mask)
    # Places without a gap between them span one less than their number.
    if not np.isin(mask, (0, 1)).all() or (len(kept) and np.ptp(kept) >= len(kept)):
        place = cell(MASK, row, where)
        raise DataError(f"{place} must be 1 for the tokens and 0 before or behind them; leave the row out")
    return {name: array[kept] for name, array in read.items()}


def _trained(mask: NDArray[np.int64], labels: NDArray[np.int64], name: str, where: str, row: int) -> NDArray[np.int64]:
    """Return the labels of the tokens that the column `name` marks."""
    if not np.isin(mask, (0, 1)).all():
        raise DataError(f"{cell(name, row, where)} must be 1 for the trained tokens and 0 for others; correct it")
    return np.where(mask == 1, labels, IGNORED_LABEL)


def _require_known(
    array: NDArray[np.int64], name: str, is_input: bool, num_tokens: int | None, where: str, row: int
) -> None:
    wrong = (array < 0) if is_input else (array < 0) & (array != IGNORED_LABEL)
    if num_tokens is not None:
        wrong |= array >= num_tokens
    if wrong.any():
        known = "" if num_tokens is None else f", and the model has {num_tokens:,} tokens"
        raise DataError(
            f"{cell(name, row, where)} has the token {array[wrong.argmax()]}{known}; tokenise the rows for this"
            " model, or name the model that they are for"
        )
