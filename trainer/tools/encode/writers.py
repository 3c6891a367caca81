"""Files of token ids: Parquet, Arrow, and the indexed form of Megatron (`megatron.core.datasets.indexed_dataset`)."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
from numpy.typing import NDArray

COLUMN = "input_ids"
_INDEX = struct.Struct("<9sQBQQ")  # magic, version, type, sequences, document boundaries
_MOST_OF_TWO_BYTES = 65_500  # tokens of a vocabulary, as Megatron chooses


class ShardWriter:
    """Writer of the rows of one shard. The files have temporary names until it is left without an error.

    Args:
        place: the path of the shard without an ending.
        num_tokens: the size of the vocabulary.
    """

    endings: tuple[str, ...]

    def __init__(self, place: Path, num_tokens: int) -> None:
        self.paths = [place.with_name(f"{place.name}{end}") for end in self.endings]
        self.new_paths = [path.with_name(f".unfinished-{path.name}") for path in self.paths]
        is_small = num_tokens < _MOST_OF_TWO_BYTES
        self.dtype = np.dtype("<u2" if is_small else "<i4")

    def add(self, rows: Sequence[Sequence[int]]) -> None:
        """Append rows of token ids."""
        raise NotImplementedError

    def close(self) -> None:
        """Complete the files."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_whole = False
        try:
            self.close()
            is_whole = kind is None
        finally:  # the disk may be full
            for new in () if is_whole else self.new_paths:
                new.unlink(missing_ok=True)


class ParquetShard(ShardWriter):
    """Parquet with a column of lists; a row group for each addition, so that a stream begins at any of them."""

    endings = (".parquet",)

    def __init__(self, place: Path, num_tokens: int) -> None:
        import pyarrow
        from pyarrow import parquet

        super().__init__(place, num_tokens)
        # int32, since other programs read it everywhere; Parquet stores few bits for small numbers.
        self._kind = pyarrow.list_(pyarrow.int32())
        schema = pyarrow.schema([(COLUMN, self._kind)])
        self._file: Any = parquet.ParquetWriter(self.new_paths[0], schema, compression="zstd", use_dictionary=False)

    def add(self, rows: Sequence[Sequence[int]]) -> None:
        import pyarrow

        self._file.write_table(pyarrow.table({COLUMN: pyarrow.array(rows, self._kind)}))

    def close(self) -> None:
        self._file.close()


class ArrowShard(ShardWriter):
    """Arrow's file format with a column of lists, a batch of rows for each addition; uncompressed, to be mapped."""

    endings = (".arrow",)

    def __init__(self, place: Path, num_tokens: int) -> None:
        import pyarrow

        super().__init__(place, num_tokens)
        self._kind = pyarrow.list_(pyarrow.from_numpy_dtype(self.dtype))
        self._file: Any = pyarrow.ipc.new_file(str(self.new_paths[0]), pyarrow.schema([(COLUMN, self._kind)]))

    def add(self, rows: Sequence[Sequence[int]]) -> None:
        import pyarrow

        self._file.write(pyarrow.record_batch({COLUMN: pyarrow.array(rows, self._kind)}))

    def close(self) -> None:
        self._file.close()


class MegatronShard(ShardWriter):
    """NAME.bin with the tokens and NAME.idx with their places; each row is a document of one sequence."""

    endings = (".bin", ".idx")

    def __init__(self, place: Path, num_tokens: int) -> None:
        super().__init__(place, num_tokens)
        self._lengths: list[int] = []
        self._tokens: IO[bytes] = self.new_paths[0].open("wb")

    def add(self, rows: Sequence[Sequence[int]]) -> None:
        self._lengths += map(len, rows)
        self._tokens.write(np.concatenate([np.asarray(row, self.dtype) for row in rows]).tobytes())

    def close(self) -> None:
        self._tokens.close()
        lengths = np.array(self._lengths, "<i4")
        starts = (np.cumsum(lengths, dtype="<i8") - lengths) * self.dtype.itemsize
        code = 8 if self.dtype.itemsize == 2 else 4
        with self.new_paths[1].open("wb") as file:
            file.write(_INDEX.pack(b"MMIDIDX\x00\x00", 1, code, len(lengths), len(lengths) + 1))
            bounds: NDArray[np.int64] = np.arange(len(lengths) + 1, dtype="<i8")
            file.write(lengths.tobytes() + starts.astype("<i8").tobytes() + bounds.tobytes())


WRITERS: dict[str, type[ShardWriter]] = {"parquet": ParquetShard, "arrow": ArrowShard, "megatron": MegatronShard}
PATTERNS = {"parquet": "*.parquet", "arrow": "*.arrow", "megatron": "*.idx"}
