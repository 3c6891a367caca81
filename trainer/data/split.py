"""Prepared splits, memory-mapped from their cache entries; all ranks and workers of a node share the pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trainer.data.order import IndexArray

FlatArray: TypeAlias = NDArray[Any]
Encoded: TypeAlias = dict[str, list[Any]]
"""Encoded rows in the form that a task returns, by column: one value for each row."""


class Encoder(Protocol):
    """The part of `trainer.tasks.task.Task` that all encodings of rows need."""

    @property
    def columns(self) -> tuple[str, ...]: ...

    @property
    def own_lengths(self) -> tuple[str, ...]: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def keeps_rows(self) -> bool: ...

    def check_columns(self, features: Mapping[str, Any], where: str) -> None: ...


@dataclass(frozen=True)
class Ragged:
    """A column with lengths of its own: row `i` owns `values[offsets[i] : offsets[i + 1]]`."""

    offsets: IndexArray  # [rows + 1]
    values: FlatArray

    def lengths_of(self, row_ids: IndexArray) -> IndexArray:
        """Return the length of each of the rows, of shape `[rows]`."""
        lengths: IndexArray = self.offsets[row_ids + 1] - self.offsets[row_ids]
        return lengths


@dataclass(eq=False, repr=False)
class EncodedSplit:
    """A prepared split as columns.

    Text `i` owns `tokens[name][offsets[i] : offsets[i + 1]]`. Row `i` owns the `texts_per_row` texts from
    `i * texts_per_row`, `scalars[name][i]`, `arrays[name][i]` and its part of `ragged[name]`. The memory of a split
    does not grow with its rows, unless `lengths` is read.

    Args:
        offsets: the start of each text in the flat columns, and the end of the last text, of shape `[texts + 1]`; zeros
            if there are no tokens.
        tokens: the columns with one value for each token, of shape `[all tokens]`, such as `input_ids`; may be empty.
        scalars: the columns with one value for each row, of shape `[rows]`.
        content_hash: the hash of the content, equal for equal content only.
        num_cut: the number of rows that were longer than `data.max_length`.
        reopen: a picklable function that maps the same split in another process; None: the arrays are pickled.
        arrays: the columns with one array for each row, all of one shape, such as images `[rows, ...]`.
        ragged: the columns with lengths of their own, such as target texts.
        texts_per_row: the number of texts of each row, such as the choices of a question.
        num_cut_targets: the number of rows with a target that was longer than `task.max_target_length`.
        sources: the number of rows of each source of a mixture, in order; empty: there is one source.
        unknown_tokens: the number of unknown tokens, and of ordinary tokens with the unknown ones; None: not counted.
        num_blank: the number of rows of special tokens only.
    """

    offsets: IndexArray
    tokens: Mapping[str, FlatArray]
    scalars: Mapping[str, FlatArray]
    content_hash: str
    num_cut: int = 0
    reopen: Callable[[], EncodedSplit] | None = None
    arrays: Mapping[str, FlatArray] = field(default_factory=dict)
    ragged: Mapping[str, Ragged] = field(default_factory=dict)
    texts_per_row: int = 1
    num_cut_targets: int = 0
    sources: tuple[int, ...] = ()
    unknown_tokens: tuple[int, int] | None = None
    num_blank: int = 0

    def __len__(self) -> int:
        return (len(self.offsets) - 1) // self.texts_per_row

    @cached_property
    def lengths(self) -> IndexArray:
        """The number of tokens of the longest text of each row, of shape `[rows]`."""
        return np.diff(self.offsets).reshape(-1, self.texts_per_row).max(axis=1)

    def lengths_of(self, row_ids: IndexArray) -> IndexArray:
        """Return the `lengths` of some rows, without those of the others."""
        longest: IndexArray = self._lengths_of_texts(row_ids).max(axis=1)
        return longest

    def texts_of(self, row_ids: IndexArray) -> IndexArray:
        """Return the indices of the texts of some rows, of shape `[rows, texts_per_row]`."""
        return row_ids[:, None] * self.texts_per_row + np.arange(self.texts_per_row)

    def _lengths_of_texts(self, row_ids: IndexArray) -> IndexArray:
        texts = self.texts_of(row_ids)
        lengths: IndexArray = self.offsets[texts + 1] - self.offsets[texts]
        return lengths

    def num_tokens(self, row_ids: IndexArray) -> int:
        """Return the number of tokens of all texts of the rows, and of their ragged columns except the labels."""
        return int(self.widths(row_ids, padded=False).sum())

    def widths(self, row_ids: IndexArray, padded: bool) -> IndexArray:
        """Return the tokens of each row: of all its texts, and of each ragged column except the labels.

        Args:
            row_ids: the indices of the rows, of shape `[rows]`.
            padded: whether all texts of a row are as long as its longest one.

        Returns:
            The numbers of tokens, of shape `[rows, columns]`.
        """
        lengths = self._lengths_of_texts(row_ids)
        texts = lengths.max(axis=1) * self.texts_per_row if padded else lengths.sum(axis=1)
        ragged = [column.lengths_of(row_ids) for name, column in self.ragged.items() if name != "labels"]
        return np.stack([texts, *ragged], axis=1)

    def with_array(self, name: str, values: FlatArray) -> EncodedSplit:
        """Return the split with another column of `arrays`, `[rows, ...]`."""
        # The files lack this column, so another process adds it again.
        reopen = None if self.reopen is None else partial(_with_array, self.reopen, name, values)
        return replace(self, arrays={**self.arrays, name: values}, reopen=reopen)

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickled memory map would copy the whole data set to each spawned worker.
        if self.reopen is not None:
            # The worker maps the same file, and so shares its pages.
            return self.reopen, ()
        return EncodedSplit, tuple(getattr(self, field.name) for field in fields(self))


def _with_array(reopen: Callable[[], EncodedSplit], name: str, values: FlatArray) -> EncodedSplit:
    return reopen().with_array(name, values)
