"""Rows of token ids that another program wrote, perhaps with an attention mask and labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

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
    found: list[tuple[list[int], list[int] | None]] = []
    for row, values in enumerate(zip(*(rows[name] for name in (column, *beside)), strict=True), first_row):
        read = {}
        for name, value in zip((column, *beside), values, strict=True):
            place = cell(name, row, where)
            if value is None or None in value:
                raise DataError(f"{place} {'is' if value is None else 'holds'} null; fill it, or leave the row out")
            if len(value) != len(values[0]):
                raise DataError(
                    f"{place} must have a number for each of {len(values[0])} tokens, but has {len(value)}; correct it"
                )
            read[name] = np.asarray(value, np.int64)
        if MASK in read:
            kept = np.flatnonzero(mask := read.pop(MASK))
            if not np.isin(mask, (0, 1)).all() or (len(kept) and np.ptp(kept) >= len(kept)):
                place = cell(MASK, row, where)
                raise DataError(f"{place} must be 1 for the tokens and 0 before or behind them; leave the row out")
            read = {name: array[kept] for name, array in read.items()}
        masks = {name: read.pop(name) for name in TRAINED if name in read}
        for name, values_of_mask in masks.items():
            if not np.isin(values_of_mask, (0, 1)).all():
                raise DataError(
                    f"{cell(name, row, where)} must be 1 for the trained tokens and 0 for others; correct it"
                )
            labels = read.get(LABELS, read[column])
            read[LABELS] = np.where(values_of_mask == 1, labels, IGNORED_LABEL)
        for name, array in read.items():
            wrong = (array < 0) if name == column else (array < 0) & (array != IGNORED_LABEL)
            if num_tokens is not None:
                wrong |= array >= num_tokens
            if wrong.any():
                known = "" if num_tokens is None else f", and the model has {num_tokens:,} tokens"
                raise DataError(
                    f"{cell(name, row, where)} has the token {array[wrong.argmax()]}{known}; tokenise the rows for this"
                    " model, or name the model that they are for"
                )
        found.append((read[column].tolist(), read[LABELS].tolist() if LABELS in read else None))
    return found
