"""The loop that encodes rows: those of a split, or of a source that is read in parts."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from trainer.base.errors import DataError, DataProblemsError
from trainer.base.terminal import say
from trainer.base.text import listed
from trainer.data.cache import EntryWriter
from trainer.data.split import Encoded, EncodedSplit, Encoder
from trainer.data.workers import ordered_results

if TYPE_CHECKING:
    from datasets import Dataset

    from trainer.data.sources import Split

MOST_ROWS_SHOWN = 5
"""Rows that are not valid, in the errors of one split."""

_ROW = re.compile(r"\brow (\d+)")
_PROGRESS_SECONDS = 10.0


class RowPacker(Protocol):
    """The part of `trainer.tasks.text.packing.Packer` that this package uses."""

    def add(self, documents: Mapping[str, list[Any]]) -> Encoded: ...

    def finish(self) -> Encoded: ...


@dataclass(frozen=True)
class RowEncoding:
    """The encoding of rows that needs no facts on their split; processes that prepare batches get a pickled copy.

    Attributes:
        encode: encodes rows of the task's columns: (rows, name of their source in messages, number of the first one).
        packer: makes a packer for the rows of a source, or None.
        facts: digests of the parts of `encode` beside the task.
        check: raises an error for encoded rows that do not fit the model; None: all fit.
    """

    task: Encoder
    encode: Callable[[Dataset, str, int], Encoded]
    packer: Callable[[], RowPacker | None]
    facts: Mapping[str, Any]
    check: Callable[[EncodedSplit], None] | None = None


def write_split(
    writer: EntryWriter,
    split: Split,
    rows: Dataset,
    encode: Callable[[Dataset, int], Encoded],
    most_rows: int,
    num_processes: int = 1,
    packer: RowPacker | None = None,
    sources: Sequence[int] = (),
) -> None:
    """Encode the rows of a split in parts, and write them in order.

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
    ends = [0, *np.cumsum(sources or (len(rows),)).tolist()]
    # A part has rows of one source only, because a packer must not join those of several.
    starts = [range(start, end, most_rows) for start, end in pairwise(ends)]
    spans = [
        (first, min(first + most_rows, end)) for firsts, end in zip(starts, ends[1:], strict=True) for first in firsts
    ]
    # Closed after an error too, because the generator then ends its processes.
    with closing(_encoded_parts(split, rows, encode, spans, num_processes)) as parts:
        for firsts in starts:
            write_source(writer, islice(parts, len(firsts)), packer)
            if sources:
                writer.end_source()


def write_source(writer: EntryWriter, parts: Iterable[Encoded], packer: RowPacker | None) -> None:
    """Write the encoded rows of one source, which a packer joins with each other only."""
    for features in parts:
        writer.add(packer.add(features) if packer and features else features)
    if packer:
        writer.add(packer.finish())


def _encoded_parts(
    split: Split,
    rows: Dataset,
    encode: Callable[[Dataset, int], Encoded],
    spans: Sequence[tuple[int, int]],
    num_processes: int,
) -> Generator[Encoded, None, None]:
    def encode_span(span: tuple[int, int]) -> Encoded:
        with split.explains_rows():
            return encode_rows(rows.select(range(*span)), span[0], encode)

    shown = time.monotonic()
    results = ordered_results(encode_span, spans, num_processes, "data.preparation_processes")
    for (_, done), features in zip(spans, results, strict=True):
        if split.show is not None:
            split.show(done, len(rows))
        if time.monotonic() - shown > _PROGRESS_SECONDS:
            shown = time.monotonic()
            say(f"prepared {done:,} of {len(rows):,} rows of {split.where}", err=True)
        yield features


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
        errors: dict[str, list[str]] = {}
        for row in range(len(rows)):
            try:
                # Row by row only after an error, to name all bad rows.
                encode(rows.select([row]), first_row + row)
            except DataError as error:
                errors.setdefault(_ROW.sub("row", str(error)), []).append(str(error))
            if len(errors) == MOST_ROWS_SHOWN:
                break
        problems = [messages[0] + _further_rows(messages[1:]) for messages in errors.values()]
        if not problems:  # the rows are valid one by one
            raise
        # The error of the whole part names its first bad row only.
        raise (DataError(problems[0]) if len(problems) == 1 else DataProblemsError(*problems)) from None


def _further_rows(messages: Sequence[str]) -> str:
    """Return the other rows with the problem of a message."""
    rows = [f"row {row[1]}" for message in messages if (row := _ROW.search(message))]
    return f" (also {listed(rows, MOST_ROWS_SHOWN)})" if rows else ""
