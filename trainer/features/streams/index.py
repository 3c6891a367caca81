"""The index of a shard: the parts from which reading can begin, with their rows; and the reading of rows from there.

The parts of Parquet are its row groups, which its footer names. Those of Arrow are its batches of rows, and those of
JSON Lines are runs of lines of about 4 MiB; one pass over the shard finds them, and the cache keeps them.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.base.digests import digest_of
from trainer.base.disk import read_plain, replace_text
from trainer.base.errors import DataError
from trainer.data.formats.base import chat_features, dataset_of, readable, require_own_names
from trainer.data.formats.json_lines import HALF_PAIR, is_text
from trainer.data.order import IndexArray
from trainer.features.streams.shards import Shard

if TYPE_CHECKING:
    from datasets import Dataset, Features

_ROWS_AT_ONCE, _BYTES_AT_ONCE = 1000, 4 << 20
_LONGEST_LINE = 32 << 20
_MARKS_AT_END = {"parquet": 4, "arrow": 6}
"""The bytes of the mark at the end of a shard; the length of the footer is before it, and the footer before that."""
_BUFFER_BYTES = 1 << 20
_MARK = b"\xef\xbb\xbf"  # of UTF-8, before the first line


@dataclass(frozen=True)
class ShardIndex:
    """The parts of a shard.

    Attributes:
        starts: the row group, the batch or the first byte of each part.
        ends: the number of rows up to the end of each part.
        checksum: of the lines, or of the footer.
    """

    shard: Shard
    starts: IndexArray
    ends: IndexArray
    checksum: int = 0

    @property
    def num_rows(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def part_of(self, row: int) -> int:
        """Return the part of a row of the shard."""
        return int(np.searchsorted(self.ends, row, side="right"))

    def first_row(self, part: int) -> int:
        """Return the first row of a part."""
        return int(self.ends[part - 1]) if part else 0


def index_of(shard: Shard, cache: Path) -> ShardIndex:
    """Return the index of a shard, from the cache if it is there.

    Raises:
        DataError: the shard is damaged, or holds other lines than JSON objects.
        TrainerError: it cannot be read.
        OSError: the cache cannot be written.
    """
    # With size and time in its name, so that a changed shard has another index.
    kept = cache / f"index-{digest_of([shard.place, shard.size, shard.stamp, shard.file_format])[:32]}.json"
    try:
        digest, _, content = read_plain(kept).decode().partition("\n")
        if digest != digest_of(content):
            raise ValueError
    except (OSError, ValueError):
        content = json.dumps(_PARTS[shard.file_format](shard))
        # Ranks of several machines may write it at once; they write the same.
        replace_text(kept, f"{digest_of(content)}\n{content}", alone=False)
    return _index(shard, *json.loads(content))


def _index(shard: Shard, pairs: Sequence[tuple[int, int]], checksum: int) -> ShardIndex:
    parts = np.array(pairs, np.int64).reshape(-1, 2)
    return ShardIndex(shard, parts[:, 0], np.cumsum(parts[:, 1]), checksum)


def _row_groups(shard: Shard) -> tuple[list[tuple[int, int]], int]:
    """Return the number of each row group with rows and its number of rows, and the checksum of the footer."""

    def counts(raw: Any) -> list[int]:
        with _parquet(raw) as file:
            return [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]

    return _with_footer(shard, counts)


def _batches(shard: Shard) -> tuple[list[tuple[int, int]], int]:
    """Return the number of each batch with rows and its number of rows, and the checksum of the footer."""

    def counts(raw: Any) -> list[int]:
        # The footer has the places of the batches; each of them has its number of rows.
        with _arrow(shard, raw) as file:
            return [file.get_batch(number).num_rows for number in range(file.num_record_batches)]

    return _with_footer(shard, counts)


def _with_footer(shard: Shard, counts: Callable[[Any], list[int]]) -> tuple[list[tuple[int, int]], int]:
    """Return the parts with rows, by the rows of all parts of an open shard, and the checksum of its footer."""

    def begin(_: int) -> Iterator[tuple[list[tuple[int, int]], int]]:
        with shard.open() as raw:
            found = counts(raw)
            yield [(number, count) for number, count in enumerate(found) if count], _footer_checksum(shard, raw)

    return next(shard.resumed(0, begin, len))


def _footer_checksum(shard: Shard, raw: Any) -> int:
    """Return the checksum of places and sizes in an open shard; one of the rows would read the whole shard."""
    end = 4 + _MARKS_AT_END[shard.file_format]
    raw.seek(-end, os.SEEK_END)
    length = int.from_bytes(raw.read(4), "little")
    raw.seek(-end - length, os.SEEK_END)
    return zlib.crc32(raw.read(length))


def _line_runs(shard: Shard) -> tuple[list[tuple[int, int]], int]:
    """Return the first byte and the number of rows of each run of lines with rows, and the checksum of all bytes."""
    start, rest, checksum = 0, b"", 0
    runs: list[tuple[int, int]] = []
    for block in chain(shard.blocks(0), [b""]):
        checksum = zlib.crc32(block, checksum)
        # The empty block at the end closes a last line that has no line feed.
        data = rest + (block or (b"\n" if rest else b""))
        end = data.rfind(b"\n") + 1
        rest = data[end:]
        _require_short(shard, start + end, rest)
        if end and (count := _count_rows(shard, start, data[:end])):
            runs.append((start, count))
        start += end
    return runs, checksum


def _count_rows(shard: Shard, start: int, lines: bytes) -> int:
    characters = np.frombuffer(lines, np.uint8)
    ends = np.flatnonzero(characters == ord("\n"))
    begins = np.concatenate([[0], ends[:-1] + 1])
    # The first byte of a line tells an object from an empty line, without a parser.
    firsts = characters[begins]
    num_empty = int((firsts == ord("\n")).sum())
    for line in np.flatnonzero((firsts != ord("{")) & (firsts != ord("\n"))):
        text = _stripped(lines[begins[line] : ends[line]])
        num_empty += not text
        if text and not text.startswith(b"{"):
            raise _no_object(shard, start + int(begins[line]), f"begins with {text[:20].decode(errors='replace')!r}")
    return len(ends) - num_empty


def _require_short(shard: Shard, start: int, line: bytes) -> None:
    if len(line) > _LONGEST_LINE:
        raise _no_object(shard, start, f"is longer than {_LONGEST_LINE >> 20} MiB")


def _stripped(line: bytes) -> bytes:
    return line.removeprefix(_MARK).strip()


def _no_object(shard: Shard, offset: int, how: str) -> DataError:
    return DataError(
        f"`data.train` must hold JSON Lines with `data.streaming`, one object on each line, but the line of `{shard}`"
        f" at byte {offset:,} {how}; convert the file"
    )


def _parquet(raw: Any) -> Any:
    """Return an open shard as a Parquet file; its pages are read when they are needed."""
    from pyarrow.parquet import ParquetFile

    # `pre_buffer` would load whole column chunks of a row group before its first row.
    return ParquetFile(raw, pre_buffer=False, buffer_size=_BUFFER_BYTES, page_checksum_verification=True)


def _arrow(shard: Shard, raw: Any) -> Any:
    """Return an open shard in Arrow's file format."""
    from pyarrow import ipc

    if raw.read(6) != b"ARROW1":
        raise DataError(
            f"`{shard}` must be in Arrow's file format with `data.streaming`, but is not, as files of `save_to_disk`"
            " are not; convert it to Parquet, or set `data.streaming` to false"
        )
    return ipc.open_file(raw)


_PARTS: Mapping[str, Callable[[Shard], tuple[list[tuple[int, int]], int]]] = {
    "parquet": _row_groups,
    "arrow": _batches,
    "json": _line_runs,
}


def first_rows(shards: Sequence[Shard]) -> Iterator[tuple[Shard, int, Dataset]]:
    """Yield a shard, a row of it, and at most 1,000 rows from there on; no pass over a shard is needed.

    Raises:
        DataError: there is no row, or a shard is damaged.
        TrainerError: it cannot be read.
    """
    is_empty = True
    for shard in shards:
        first_row = 0
        if shard.file_format == "parquet":
            index = _index(shard, *_row_groups(shard))
        else:
            # One part without an end, since the rows are not counted yet.
            index = ShardIndex(shard, np.array([0]), np.array([np.iinfo(np.int64).max]))
        for rows in RowReader([index]).all_rows(index, 0):
            is_empty = False
            yield shard, first_row, rows
            first_row += len(rows)
    if is_empty:
        raise DataError("`data.train` must hold at least one row, but its shards have none")


class RowReader:
    """Reads rows of shards, and goes on where it stopped, if the next rows follow in the same part or the next one.

    Args:
        columns: the columns to read; None: all.
        features: the types of columns of JSON Lines; None: those of the rows.
    """

    def __init__(
        self, shards: Sequence[ShardIndex], columns: Sequence[str] | None = None, features: Features | None = None
    ) -> None:
        self._shards = shards
        self._columns = columns
        self._features = features
        self._rows: Iterator[Dataset] = iter(())
        self._place: tuple[int, int] = (-1, 0)  # the shard of `_rows`, and its next row
        self._left: Dataset | None = None  # rows at this place

    def __reduce__(self) -> tuple[Any, ...]:
        return RowReader, (self._shards, self._columns, self._features)  # open files stay in their process

    def read(self, number: int, start: int, stop: int) -> Iterator[tuple[int, Dataset]]:
        """Yield rows of a shard, from row `start` to `stop`, with the number of the first one in the shard.

        Raises:
            DataError: the shard is damaged, has changed, or a value has another type than those before.
            TrainerError: the shard cannot be read.
        """
        index = self._shards[number]
        shard, row = self._place
        # A new start is needed if the rows lie before this place, or so far behind it that a jump is cheaper.
        if shard != number or row > start or index.part_of(start) > index.part_of(row) + 1:
            self._rows, self._left = self.all_rows(index, start), None
            self._place = (number, start)
        while (row := self._place[1]) < stop:
            try:
                rows = self._left if self._left is not None else next(self._rows, None)
            except BaseException:
                # The error has ended the generator, so the next call begins a new one.
                self._place = (-1, 0)
                raise
            if rows is None:
                raise _changed(index)
            end = row + len(rows)
            # Rows that were decoded beyond `stop` serve the next call.
            self._left = rows.select(range(stop - row, len(rows))) if end > stop else None
            self._place = (number, min(end, stop))
            if end > start:
                first = max(row, start)
                yield first, rows.select(range(first - row, min(end, stop) - row))

    def all_rows(self, index: ShardIndex, start: int) -> Iterator[Dataset]:
        """Yield the rows of a shard from a row on, in parts."""
        readers = {"parquet": self._parquet_rows, "arrow": self._arrow_rows, "json": self._json_rows}
        begin = readers[index.shard.file_format]
        return index.shard.resumed(start, lambda row: begin(index, row), len)

    def _parquet_rows(self, index: ShardIndex, start: int) -> Iterator[Dataset]:
        from pyarrow import Table

        if start >= index.num_rows:
            return
        first = index.part_of(start)
        with index.shard.open() as raw, _parquet(raw) as file:
            features = self._types(file.schema_arrow, index.shard)
            columns = list(features)
            skip = start - index.first_row(first)
            for part in range(first, len(index.starts)):
                group = int(index.starts[part])
                if group >= file.num_row_groups:
                    raise _changed(index)
                at_once = _rows_at_once(index.shard, file.metadata.row_group(group), columns)
                for batch in file.iter_batches(at_once, row_groups=[group], columns=columns, use_threads=False):
                    if len(batch) <= skip:
                        skip -= len(batch)
                        continue
                    yield dataset_of(Table.from_batches([batch.slice(skip)]), features)
                    skip = 0

    def _arrow_rows(self, index: ShardIndex, start: int) -> Iterator[Dataset]:
        from pyarrow import Table

        if start >= index.num_rows:
            return
        first = index.part_of(start)
        with index.shard.open() as raw, _arrow(index.shard, raw) as file:
            features = self._types(file.schema, index.shard)
            skip = start - index.first_row(first)
            for number in range(int(index.starts[first]), file.num_record_batches):
                batch = file.get_batch(number).select(list(features))
                if len(batch) <= skip:
                    skip -= len(batch)
                    continue
                batch.validate(full=True)  # a wrong offset would be read outside of the batch
                at_once = min(_ROWS_AT_ONCE, max(1, _BYTES_AT_ONCE * len(batch) // max(1, batch.nbytes)))
                for row in range(skip, len(batch), at_once):
                    yield dataset_of(Table.from_batches([batch.slice(row, at_once)]), features)
                skip = 0

    def _types(self, schema: Any, shard: Shard) -> Features:
        """Return the types of the columns that are read, from the schema of Arrow of a shard."""
        from datasets import Features

        require_own_names(schema.names, f"`{shard}`")
        features = readable(schema)
        names = list(features)
        columns = names if self._columns is None else list(self._columns)
        if missing := [name for name in columns if name not in names]:
            raise DataError(
                f"`data.train` must name shards with the same columns, but `{shard}` has no {missing[0]}, only"
                f" {', '.join(names)}; rename columns, or leave the shard out"
            )
        return Features({name: features[name] for name in columns})

    def _json_rows(self, index: ShardIndex, start: int) -> Iterator[Dataset]:
        if start >= index.num_rows:
            return
        part = index.part_of(start)
        skip = start - index.first_row(part)
        lines: list[bytes] = []
        size, row = 0, start
        for line in _lines(index.shard, int(index.starts[part])):
            if skip:
                skip -= 1
                continue
            lines.append(line)
            size += len(line)
            if len(lines) == _ROWS_AT_ONCE or size >= _BYTES_AT_ONCE:
                yield self._parsed(index.shard, lines, row)
                row += len(lines)
                lines, size = [], 0
        if lines:
            yield self._parsed(index.shard, lines, row)

    def _parsed(self, shard: Shard, lines: Sequence[bytes], first_row: int) -> Dataset:
        import datasets

        rows = []
        for number, line in enumerate(lines, start=first_row + 1):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"row {number} of `{shard}` is not JSON: {error}; correct the line") from error
            if not isinstance(row, dict):
                raise DataError(f"row {number} of `{shard}` must be a JSON object, but is not; write one on each line")
            # Only an escape can hold half of a surrogate pair, so other lines need no look.
            if b"\\ud" in line.lower() and not is_text(row):
                raise DataError(f"row {number} of `{shard}` {HALF_PAIR}")
            rows.append(row if self._columns is None else {name: row.get(name) for name in self._columns})
        try:
            found = datasets.Dataset.from_list(rows, features=self._features)
            chats = chat_features(found.features) if self._features is None else None
            return datasets.Dataset.from_list(rows, features=chats) if chats else found
        except (ValueError, TypeError, OverflowError) as error:
            raise DataError(
                f"rows {first_row + 1:,} to {first_row + len(rows):,} of `{shard}` must have values of the same types"
                f" as the first rows of the stream, but have others: {error}; write the values alike"
            ) from error


def _changed(index: ShardIndex) -> DataError:
    return DataError(
        f"`{index.shard}` must not change during a run, but has fewer than its {index.num_rows:,} rows; restore it,"
        " or start a new run"
    )


def _rows_at_once(shard: Shard, group: Any, columns: Sequence[str]) -> int:
    """Return the rows of a row group of Parquet that are read together, by the uncompressed bytes of these columns."""
    chunks = map(group.column, range(group.num_columns))
    prefixes = tuple(f"{name}." for name in columns)  # names may have dots, and so have the paths of nested columns
    read = sum(one.total_uncompressed_size for one in chunks if f"{one.path_in_schema}.".startswith(prefixes))
    row_bytes: int = max(1, read // group.num_rows)
    if row_bytes > _LONGEST_LINE:
        raise DataError(
            f"rows of `data.train` must have at most {_LONGEST_LINE >> 20} MiB, but those of a row group of `{shard}`"
            f" have {row_bytes >> 20:,} MiB on average; write smaller values, or leave the shard out"
        )
    return min(_ROWS_AT_ONCE, max(1, _BYTES_AT_ONCE // row_bytes))


def _lines(shard: Shard, start: int) -> Iterator[bytes]:
    rest = b""
    for block in shard.blocks(start):
        start += len(block)
        # A block may end in the middle of a line.
        *whole, rest = (rest + block).split(b"\n")
        _require_short(shard, start - len(rest), rest)
        yield from filter(None, map(_stripped, whole))
    if text := _stripped(rest):
        yield text
