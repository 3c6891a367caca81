"""Prepared splits, memory-mapped from their cache entries; all ranks and workers of a node share the pages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trainer.base.errors import DataError, DataProblemsError
from trainer.base.text import listed
from trainer.data.order import IndexArray
from trainer.data.workers import ordered_results

if TYPE_CHECKING:
    from datasets import Dataset

    from trainer.data.sources import Split

FlatArray: TypeAlias = NDArray[Any]
Encoded: TypeAlias = dict[str, list[Any]]
"""Encoded rows in the form that a task returns, by column: one value for each row."""

MOST_ROWS_SHOWN = 5
"""Rows that are not valid, in the errors of one split."""

_ROW = re.compile(r"\brow (\d+)")


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
        reopen = None if self.reopen is None else partial(_with_array, self.reopen, name, values)
        return replace(self, arrays={**self.arrays, name: values}, reopen=reopen)

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickled memory map would copy the whole data set to each spawned worker.
        if self.reopen is not None:
            # The worker maps the same file, and so shares its pages.
            return self.reopen, ()
        return EncodedSplit, tuple(getattr(self, one.name) for one in fields(self))


def _with_array(reopen: Callable[[], EncodedSplit], name: str, values: FlatArray) -> EncodedSplit:
    return reopen().with_array(name, values)


def joined_rows(parts: Sequence[tuple[EncodedSplit, IndexArray]]) -> EncodedSplit:
    """Return rows of several splits with the same columns as a split in memory.

    Args:
        parts: splits, and the indices of their rows, at least one over all.
    """
    parts = [(split, rows) for split, rows in parts if len(rows)]
    first = parts[0][0]
    tokens: dict[str, list[FlatArray]] = {name: [] for name in first.tokens}
    ragged: dict[str, list[FlatArray]] = {name: [] for name in first.ragged}
    of_ragged: dict[str, list[IndexArray]] = {name: [np.zeros(1, np.int64)] for name in first.ragged}
    lengths = []
    for split, rows in parts:
        texts = split.texts_of(rows).ravel()
        places = _places(split.offsets, texts)
        lengths.append(split.offsets[texts + 1] - split.offsets[texts])
        for name, found in tokens.items():
            found.append(split.tokens[name][places])
        for name, found in ragged.items():
            column = split.ragged[name]
            of_ragged[name].append(column.lengths_of(rows))
            found.append(column.values[_places(column.offsets, rows)])
    return EncodedSplit(
        np.cumsum(np.concatenate([np.zeros(1, np.int64), *lengths])),
        {name: np.concatenate(found) for name, found in tokens.items()},
        {name: np.concatenate([split.scalars[name][rows] for split, rows in parts]) for name in first.scalars},
        content_hash="",
        arrays={name: np.concatenate([split.arrays[name][rows] for split, rows in parts]) for name in first.arrays},
        ragged={
            name: Ragged(np.cumsum(np.concatenate(of_ragged[name])), np.concatenate(found))
            for name, found in ragged.items()
        },
        texts_per_row=first.texts_per_row,
    )


def _places(offsets: IndexArray, owners: IndexArray) -> IndexArray:
    starts, ends = offsets[owners], offsets[owners + 1]
    return np.concatenate([np.arange(start, end) for start, end in zip(starts, ends, strict=True)])


def encode_rows(rows: Dataset, first_row: int, encode: Callable[[Dataset, int], Encoded]) -> Encoded:
    """Return the encoded rows.

    Args:
        rows: consecutive rows of a split.
        first_row: the index of `rows[0]` in the split.
        encode: encodes consecutive rows, from an index on.

    Raises:
        DataError: a row is not valid.
        DataProblemsError: several rows are not valid; the error has `MOST_ROWS_SHOWN` kinds of problems, each once.
    """
    try:
        return encode(rows, first_row)
    except DataError:
        found: dict[str, list[str]] = {}
        for row in range(len(rows)):
            try:
                # Row by row only after an error, to name all bad rows.
                encode(rows.select([row]), first_row + row)
            except DataError as error:
                found.setdefault(_ROW.sub("row", str(error)), []).append(str(error))
            if len(found) == MOST_ROWS_SHOWN:
                break
        problems = [messages[0] + _further_rows(messages[1:]) for messages in found.values()]
        if not problems:  # the rows are valid one by one
            raise
        raise (DataError(problems[0]) if len(problems) == 1 else DataProblemsError(*problems)) from None


def encoded_parts(
    split: Split,
    rows: Dataset,
    encode: Callable[[Dataset, int], Encoded],
    most_rows: int,
    num_processes: int = 1,
    sources: Sequence[int] = (),
) -> Iterator[tuple[int, Encoded]]:
    """Yield the encoded rows of a split in order, in parts, each with the number of rows up to its end.

    Args:
        rows: the rows of the split, with the columns that are read.
        encode: see `encode_rows`; it runs in the processes.
        most_rows: the most rows of a part.
        num_processes: see `ordered_results`.
        sources: the numbers of rows that no part joins; empty: any rows are joined.

    Raises:
        DataError: a row is not valid.
        TrainerError: a process died.
    """
    ends = np.cumsum(sources or (len(rows),)).tolist()
    spans = [
        (first_row, min(first_row + most_rows, end))
        for start, end in zip((0, *ends), ends, strict=False)
        for first_row in range(start, end, most_rows)
    ]

    def encode_span(span: tuple[int, int]) -> Encoded:
        with split.explains_rows():
            return encode_rows(rows.select(range(*span)), span[0], encode)

    results = ordered_results(encode_span, spans, num_processes, "data.preparation_processes")
    for (_, done), features in zip(spans, results, strict=True):
        yield done, features
        if split.show is not None:
            split.show(done, len(rows))


def _further_rows(messages: Sequence[str]) -> str:
    """Return the other rows with the problem of a message."""
    rows = [row[1] for message in messages if (row := _ROW.search(message))]
    return f" (also row{'s' * (len(rows) > 1)} {listed(rows, MOST_ROWS_SHOWN)})" if rows else ""
