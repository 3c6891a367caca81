"""The global batches of a stream: consecutive shuffled rows of its windows. World size and workers have no effect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from trainer.base.errors import DataError, UsageError
from trainer.data.loader import StepRows
from trainer.data.order import IndexArray
from trainer.features.streams.streamed_split import StreamedSplit

Part = tuple[int, int, int, int]
"""Rows of a window: epoch, window, start and stop."""


@dataclass(frozen=True)
class StreamPlace:
    """The place of the next row of a training: an epoch, a window of it, and the row in this window."""

    epoch: int
    window: int = 0
    row: int = 0


class StreamOrder:
    """The order of all global batches of a stream. The last batch of an epoch holds the remaining rows.

    Args:
        size_of: returns the rows of a step.
        start_sample: the number of rows consumed in these steps.
        place: the place of the next row after them; None: the first row.

    Raises:
        UsageError: there is no such place, because the stream has changed.
    """

    def __init__(
        self,
        split: StreamedSplit,
        size_of: Callable[[int], int],
        first_step: int = 0,
        start_sample: int = 0,
        place: tuple[int, int, int] | None = None,
    ) -> None:
        self._split = split
        self._size_of = size_of
        start = StreamPlace(*(place or (0, 0, 0)))
        is_there = (place is not None or not start_sample) and start.window < len(split.windows)
        is_there = is_there and start.row < max(1, split.num_rows(start.epoch, start.window))
        if is_there and split.keeps_rows:
            # Rows and place are two counts of the same; if they differ, the stream is another one.
            before = start.epoch * split.windows.num_rows + int(split.windows.bounds[start.window])
            is_there = before + start.row == start_sample
        if not is_there:
            raise UsageError(
                f"the checkpoint continues at row {start.row} of window {start.window} of epoch {start.epoch} after"
                f" {start_sample} rows, but `data.train` has no such place; continue with the stream of the checkpoint,"
                " or start a new run in another `checkpoint.folder`"
            )
        self._first = self._next = (first_step, start)

    def first_step(self) -> int:
        return self._first[0]

    def row_ids(self, step: int) -> IndexArray:
        """Return the numbers of the rows of a global batch: those of the rows of all shards, in order.

        If the task changes the number of rows, they are places in their window, in the order of reading.
        """
        found = []
        for epoch, window, start, stop in self._parts(step)[0]:
            num_rows = self._split.num_rows(epoch, window)
            rows = self._split.windows.row_order(epoch, window, num_rows)[start:stop]
            found.append(self._split.source_rows(epoch, window)[rows] if self._split.keeps_rows else rows)
        return np.concatenate(found)

    def of_step(self, step: int) -> StepRows:
        parts, place = self._parts(step)
        split = self._split.take(parts)
        return StepRows(split, np.arange(len(split)), step, (place.epoch, place.window, place.row))

    def close(self) -> None:
        self._split.close()

    def _parts(self, step: int) -> tuple[list[Part], StreamPlace]:
        """Return the parts of windows of a global batch, and the place after it."""
        # Steps come in order nearly always, so the place of the last one is kept; an earlier step begins anew.
        number, place = self._next if step >= self._next[0] else self._first
        while number < step:
            number, place = number + 1, self._batch(number, place)[1]
        self._next = (number, place)
        return self._batch(number, place)

    def _batch(self, step: int, place: StreamPlace) -> tuple[list[Part], StreamPlace]:
        parts: list[Part] = []
        missing, begun = self._size_of(step), place.epoch
        # A batch ends with its epoch, unless it would be empty.
        while missing and (place.epoch == begun or not parts):
            num_rows = self._split.num_rows(place.epoch, place.window)
            stop = min(place.row + missing, num_rows)
            if stop > place.row:
                parts.append((place.epoch, place.window, place.row, stop))
                missing -= stop - place.row
            if stop < num_rows:
                place = replace(place, row=stop)
            elif place.window + 1 < len(self._split.windows):
                place = StreamPlace(place.epoch, place.window + 1)
            else:
                place = StreamPlace(place.epoch + 1)
            if place.epoch > begun + 1:
                raise DataError("`data.train` must hold a text with a token, but its shards have none")
        return parts, place
