"""A training split that is read, tokenised and forgotten window by window.

One process of a node prepares a window and writes it to the cache; the others of this node map it. The cache keeps a
few windows only.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock, Timeout
from torch.utils.data import get_worker_info

from trainer.base.digests import digest_of
from trainer.base.errors import DataError, TrainerError, storage_error
from trainer.data.cache import EntryWriter, entry_key, open_or_write
from trainer.data.encoding import RowEncoding, encode_rows, write_source
from trainer.data.order import IndexArray
from trainer.data.row_transform import SourceTransform
from trainer.data.split import Encoded, EncodedSplit
from trainer.data.workers import one_thread_of_tokenizers
from trainer.features.streams.index import RowReader, ShardIndex, index_of
from trainer.features.streams.joining import joined_rows
from trainer.features.streams.shards import Shard, naming_waits
from trainer.features.streams.windows import Span, Windows

if TYPE_CHECKING:
    from datasets import Dataset, Features

_AT_ONCE = 4  # shards that are indexed
_OPEN = 2  # windows that a process keeps mapped
_AHEAD = 4  # windows that processes which prepare batches may prepare before they are needed
_LOCKS = 64  # files of locks, which windows share: a file of each window would stay behind
_WINDOW = re.compile(r"window-(\d+)")


@dataclass(frozen=True)
class WindowEncoder:
    """From rows to a window of encoded rows.

    Attributes:
        features: the types of the columns of the source, from the first rows.
        transform: makes the columns of the task; None: they are those of the source.
    """

    encoding: RowEncoding
    features: Features
    transform: SourceTransform | None

    @property
    def keeps_rows(self) -> bool:
        """Whether a window has as many encoded rows as rows."""
        drops_rows = self.transform is not None and self.transform.drops_rows
        return self.encoding.task.keeps_rows and self.encoding.packer() is None and not drops_rows

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the source that are read."""
        wanted = self.encoding.task.columns
        return tuple(dict.fromkeys(wanted)) if self.transform is None else self.transform.reads(wanted)

    def encode(self, rows: Dataset, first_row: int, where: str) -> Encoded:
        """Return encoded rows, of a shard that messages call `where` from its row `first_row` on."""
        if self.transform is not None:
            rows = self.transform.of_table(rows, first_row, where)
            if not len(rows):
                return {}
            if self.transform.drops_rows:
                where, first_row = f"the filtered rows of {where} from row {first_row + 1} on", 0
        return encode_rows(rows, first_row, lambda rows, first_row: self.encoding.encode(rows, where, first_row))


@dataclass(frozen=True)
class StreamSettings:
    """The keys of a stream: the rows of a window, the weights of its sources, and the seed of its order."""

    window: int
    weights: Sequence[float] | None
    seed: int
    run: str  # runs do not share windows, because each removes those that it has passed
    behind: int  # windows that a process may still need when another one is ahead


class StreamedSplit:
    """The training split of a stream.

    Args:
        head_rows: the number of rows that became `head`.

    Attributes:
        windows: the rows of each window.
        content_hash: changes with the names, sizes, rows and checksums of the shards, and with how they are encoded.
    """

    def __init__(
        self,
        sources: Sequence[Sequence[Shard]],
        settings: StreamSettings,
        encoder: WindowEncoder,
        head: EncodedSplit,
        head_rows: int,
        cache: Path,
    ) -> None:
        shards = indexed(sources, cache / "streams")
        self.windows = Windows(shards, settings.weights, settings.window, settings.seed)
        self.head = head
        self._head_rows = head_rows
        self._encoder = encoder
        encoding = encoder.encoding
        self._settings = settings
        self._shards = [shard for source in shards for shard in source]
        transform = encoder.transform
        facts: dict[str, Any] = {
            "window": settings.window,
            **encoding.facts,
            "map": repr(transform and transform.facts),
        }
        names = [
            [(Path(one.shard.place).name, one.shard.size, one.num_rows, one.checksum) for one in source]
            for source in shards
        ]
        # Without the place and the stamp of shards: a copy of the stream at another place is the same data.
        self.content_hash = digest_of([names, encoding.task.fingerprint, facts])
        stamps = [(one.shard.place, one.shard.size, one.shard.stamp) for one in self._shards]
        order = [settings.weights, settings.seed, list(map(len, sources)), settings.run]
        # With them: the cache must not serve windows of shards that changed in place.
        key = entry_key(encoding.task, **facts, shards=stamps, order=order)
        self._folder = cache / "streams" / key
        self._mapped: OrderedDict[int, EncodedSplit] = OrderedDict()
        self._begun = -1  # the last window that was begun ahead
        self._has_read = False
        self._thread: ThreadPoolExecutor | None = None
        self._reader = RowReader(self._shards, encoder.columns, known(encoder.features, encoder.columns))

    @property
    def keeps_rows(self) -> bool:
        """Whether an epoch has as many rows as the shards; otherwise `len` is an estimate by the first rows."""
        return self._encoder.keeps_rows

    def __len__(self) -> int:
        if self.keeps_rows:
            return self.windows.num_rows
        return max(1, round(self.windows.num_rows * len(self.head) / self._head_rows))

    @property
    def head_row_bytes(self) -> float:
        """The bytes that a row of the shards has after it was encoded, from the first rows."""
        head = self.head
        ragged = [column.values for column in head.ragged.values()]
        arrays = [head.offsets, *head.tokens.values(), *head.scalars.values(), *head.arrays.values(), *ragged]
        num_bytes: int = sum(array.nbytes for array in arrays)
        return num_bytes / self._head_rows

    def num_rows(self, epoch: int, window: int) -> int:
        """Return the number of encoded rows of a window."""
        if self.keeps_rows:
            return int(self.windows.bounds[window + 1] - self.windows.bounds[window])
        return len(self.window(epoch, window))

    def window(self, epoch: int, window: int) -> EncodedSplit:
        """Return the encoded rows of a window in the order in which they are read.

        Raises:
            DataError: a shard or a value is not valid.
            TrainerError: a shard cannot be read.
        """
        number = epoch * len(self.windows) + window
        if number not in self._mapped:
            # A worker has time to prepare the next windows; the rank itself must go on with its step.
            self._mapped[number] = self._threaded(number) if get_worker_info() else self._prepared(number)
            self._forget(number)
            while len(self._mapped) > _OPEN:
                self._mapped.popitem(last=False)
        self._mapped.move_to_end(number)
        return self._mapped[number]

    def _threaded(self, number: int) -> EncodedSplit:
        """Return a window, and begin those after it, in a thread of a process that has time for it."""
        # One thread: `_reader` has one place, and windows follow each other in the shards.
        self._thread = self._thread or ThreadPoolExecutor(1)
        rows = self._thread.submit(self._prepared, number).result()
        for later in range(max(number, self._begun) + 1, number + 1 + _AHEAD):
            self._thread.submit(self._prepare_ahead, later)
            self._begun = later
        return rows

    def _prepare_ahead(self, number: int) -> None:
        """Write a window that no other process writes."""
        with suppress(Timeout, TrainerError), FileLock(self._folder / f"ahead-{number % _LOCKS}.lock", timeout=0):
            self._prepared(number)  # an error is raised again when the window is needed

    def take(self, parts: Sequence[tuple[int, int, int, int]]) -> EncodedSplit:
        """Return rows of windows, shuffled in their window: of (epoch, window, start, stop) in this order."""
        found = []
        for epoch, window, start, stop in parts:
            rows = self.window(epoch, window)
            found.append((rows, self.windows.row_order(epoch, window, len(rows))[start:stop]))
        return joined_rows(found)

    def source_rows(self, epoch: int, window: int) -> IndexArray:
        """Return the numbers of the rows of a window, over the rows of all shards in order."""
        firsts = np.cumsum([0, *(shard.num_rows for shard in self._shards)])
        spans = self.windows.spans(epoch, window)
        return np.concatenate([firsts[span.shard] + np.arange(span.start, span.stop) for span in spans])

    def close(self) -> None:
        """Remove all windows from the cache; a process that still needs one prepares it again."""
        self._forget(sys.maxsize)

    def _prepared(self, number: int) -> EncodedSplit:
        epoch, window = divmod(number, len(self.windows))
        own_lengths, lock = self._encoder.encoding.task.own_lengths, f"lock-{number % _LOCKS}"
        write = partial(self._write, epoch, window)
        rows = open_or_write(self._folder, f"window-{number}", write, own_lengths, lock)
        if self.keeps_rows and len(rows) != self.num_rows(epoch, window):
            raise DataError(
                f"the shards of `data.train` must not change during a run, but a window has {len(rows):,} rows"
                f" instead of {self.num_rows(epoch, window):,}; restore them, or start a new run"
            )
        check = self._encoder.encoding.check
        if len(rows) and check is not None:
            check(rows)
        return rows

    def _write(self, epoch: int, window: int, writer: EntryWriter) -> None:
        # Later windows are read while steps run.
        naming = nullcontext() if self._has_read else naming_waits("the first window of `data.train`")
        self._has_read = True
        with naming, one_thread_of_tokenizers() if get_worker_info() else nullcontext():
            for _, spans in groupby(self.windows.spans(epoch, window), lambda span: span.source):
                write_source(writer, self._encoded(spans), self._encoder.encoding.packer())

    def _encoded(self, spans: Iterable[Span]) -> Iterator[Encoded]:
        for span in spans:
            where = f"`{self._shards[span.shard].shard}`"
            for first_row, rows in self._reader.read(span.shard, span.start, span.stop):
                yield self._encoder.encode(rows, first_row, where)

    def _forget(self, number: int) -> None:
        """Remove the windows from the cache that no process needs any more."""
        # A run without further steps has written no window, and no folder.
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            found = _WINDOW.match(path.name)
            # Slower processes of the node may still read windows that far behind.
            if found and int(found[1]) < number - self._settings.behind:
                removed = path.with_name(f"removed-{os.getpid()}-{path.name}")
                with suppress(OSError):  # another process removes it
                    path.rename(removed)  # at once, so that no process maps a half of it
                shutil.rmtree(removed, ignore_errors=True)


def known(features: Features, columns: Sequence[str]) -> Features | None:
    """Return the types of columns; None if the first rows do not show that of a column, in which all are null."""
    import datasets

    own = datasets.Features({name: features[name] for name in columns})
    return None if any(getattr(feature, "dtype", "") == "null" for feature in own.values()) else own


def indexed(sources: Sequence[Sequence[Shard]], folder: Path) -> list[list[ShardIndex]]:
    """Return the indices of all shards; one process of a node reads the shards, and the others wait.

    Raises:
        DataError: a shard is damaged.
        TrainerError: a shard cannot be read, or the cache cannot be written.
    """
    shards = list(dict.fromkeys(shard for source in sources for shard in source))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / f"index-{digest_of([shard.place for shard in shards])[:32]}.lock")
        with naming_waits("the index of `data.train`"), lock, ThreadPoolExecutor(_AT_ONCE) as threads:
            found = dict(zip(shards, threads.map(partial(index_of, cache=folder), shards), strict=True))
    except OSError as error:
        raise storage_error(
            f"`data.cache` must be a folder that can be written, but the index of shards cannot be kept in `{folder}`:"
            f" {error}; make room or name another folder",
            error,
        ) from error
    return [[found[shard] for shard in source] for source in sources]
