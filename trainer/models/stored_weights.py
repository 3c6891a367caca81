"""Tensors of safetensors files, read in part: by each rank for itself, or by one rank for all ranks of its node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from trainer.models.place import ModelCut
from trainer.parallel.groups import group_size, index_in_group
from trainer.parallel.placement import ParameterPlacement
from trainer.parallel.shards.slices import ranges_of_part

if TYPE_CHECKING:
    from trainer.parallel.node import NodeRanks

_CHUNK_ELEMENTS = 1 << 22  # compared at once
_CHUNK_BYTES = 1 << 23  # sent at once

Index = tuple[slice, ...]


class StoredWeights:
    """The tensors of safetensors files.

    A file is opened again for each tensor, because pages of a mapped file count as this process's memory until it is
    closed. Mapped pages therefore never exceed the size of one tensor.

    Raises:
        SafetensorError: a file is damaged.
    """

    device = "cpu"

    def __init__(self, files: Sequence[str | Path]) -> None:
        self._files: dict[str, str | Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        for file in files:
            with safe_open(file, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118  # `opened` is not a mapping
                    stored = opened.get_slice(key)
                    self._files[key] = file
                    self.shapes[key] = tuple(stored.get_shape())
                    # Without rows, only the header is read; a scalar has no rows to leave out.
                    self.dtypes[key] = (stored[:0] if self.shapes[key] else opened.get_tensor(key)).dtype

    def again(self) -> StoredWeights:
        """Return the same tensors for reads of this rank alone."""
        return self

    def read(self, key: str, placement: ParameterPlacement | None = None, cut: ModelCut | None = None) -> Tensor:
        """Return a copy of a tensor, in fp32 if its type is floating.

        With `placement` and `cut`, only this rank's part of it is read, equal to that of `ModelCut.part`; of the part,
        the own shard.
        """
        shape, dtype = self.shapes[key], self.dtypes[key]
        # Weights begin in fp32, whatever the type of the files; integers, such as codes, keep their type.
        dtype = torch.float32 if dtype.is_floating_point else dtype
        if placement is None or cut is None or not shape or (not placement.splits and cut.shard is None):
            whole = torch.empty(shape, dtype=dtype, device=self.device)
            self._copy(key, [((), whole)])
            return whole
        extent, slices = _slices_of_part(shape, placement, cut)
        # Zeros, because the padding of a last part is in no slice of the file.
        part = torch.zeros(extent, dtype=dtype, device=self.device)
        self._copy(key, [(index, part.narrow(dim, *place)) for dim, place, index in slices])
        return part

    def wanted(self, needed: Sequence[bool]) -> Sequence[bool]:
        """Return which tensors of a list must be read, given those that this rank needs."""
        return needed

    def parts(self, key: str) -> dict[str, Tensor] | None:
        """Return the tensors of a `WeightForm` that stand for a tensor; None if none do."""
        return None

    def read_along(self, key: str) -> None:
        """Take part in the reading of a tensor that another rank needs."""
        self._copy(key, [])

    def equal(self, key: str, other: str) -> bool:
        """Return whether two tensors have the same elements; they are read a few rows at a time."""
        if self.shapes[key] != self.shapes[other]:
            return False
        if not self.shapes[key]:
            return torch.equal(self.read(key), self.read(other))
        num_rows, *columns = self.shapes[key]
        # A few rows at a time: embeddings and heads are the largest tensors.
        step = max(1, _CHUNK_ELEMENTS // max(1, torch.Size(columns).numel()))
        return all(
            torch.equal(*(self.rows(name, start, start + step) for name in (key, other)))
            for start in range(0, num_rows, step)
        )

    def rows(self, key: str, start: int, stop: int) -> Tensor:
        """Return a copy of some rows of a tensor, in its own type; a scalar is one row."""
        with safe_open(self._files[key], framework="pt") as opened:
            rows: Tensor = opened.get_slice(key)[start:stop] if self.shapes[key] else opened.get_tensor(key)
            # The clone lets go of the pages of the mapped file.
            return rows.clone()

    def _copy(self, key: str, targets: Sequence[tuple[Index, Tensor]]) -> None:
        """Copy slices of a stored tensor, each to its target; without an index, the whole tensor."""
        with safe_open(self._files[key], framework="pt") as opened:
            for index, target in targets:
                # `copy_` casts to the type of the target, and the mapped pages are freed with the file.
                target.copy_(opened.get_slice(key)[index] if index else opened.get_tensor(key))


class ChangedWeights(StoredWeights):
    """Stored tensors; some have other shapes than in their files."""

    def __init__(self, stored: StoredWeights, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._stored, self._changed = stored, shapes
        self.device, self.dtypes, self.shapes = stored.device, stored.dtypes, stored.shapes | dict(shapes)

    def again(self) -> StoredWeights:
        return type(self)(self._stored.again(), self._changed)

    def wanted(self, needed: Sequence[bool]) -> Sequence[bool]:
        return self._stored.wanted(needed)

    def parts(self, key: str) -> dict[str, Tensor] | None:
        return self._stored.parts(key)

    def equal(self, key: str, other: str) -> bool:
        return self.shapes[key] == self.shapes[other] and self._stored.equal(key, other)

    def _copy(self, key: str, targets: Sequence[tuple[Index, Tensor]]) -> None:
        self._stored._copy(key, targets)


class FewerWeights(ChangedWeights):
    """Stored tensors without some of them."""

    def __init__(self, stored: StoredWeights, left_out: Collection[str]) -> None:
        super().__init__(stored, {})
        self._left_out = left_out
        self.shapes = {key: shape for key, shape in self.shapes.items() if key not in left_out}

    def again(self) -> StoredWeights:
        return FewerWeights(self._stored.again(), self._left_out)


class EnlargedWeights(ChangedWeights):
    """Stored tensors with more rows than their files have; the mean of the stored rows is in each further one.

    Every rank computes the same mean, from all rows.

    Args:
        shapes: the shapes of the larger ones, which differ from those of the files in one dimension.
    """

    def __init__(self, stored: StoredWeights, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__(stored, shapes)
        self._means: dict[str, Tensor] = {}

    def _copy(self, key: str, targets: Sequence[tuple[Index, Tensor]]) -> None:
        if key not in self._changed:
            super()._copy(key, targets)
            return
        shape, before = self.shapes[key], self._stored.shapes[key]
        dim = next(dim for dim, size in enumerate(shape) if size != before[dim])
        # The mean needs all rows, which are read once for all slices of the tensor.
        if key not in self._means:
            self._means[key] = _mean(self._stored.read(key), dim)
        stored: list[tuple[Index, Tensor]] = []
        for index, target in targets:
            slices = (*index, *[slice(None)] * (len(shape) - len(index)))
            places = [slice(*part.indices(size)) for part, size in zip(slices, shape, strict=True)]
            rows = places[dim]
            # A slice may begin in stored rows and end in further ones, or lie wholly in either.
            num_stored = max(0, min(rows.stop, before[dim]) - rows.start)
            if num_stored:
                places[dim] = slice(rows.start, rows.start + num_stored)
                stored.append((tuple(places), target.narrow(dim, 0, num_stored)))
            places[dim] = slice(None)
            target.narrow(dim, num_stored, rows.stop - rows.start - num_stored).copy_(self._means[key][tuple(places)])
        # Also without a slice: ranks of a node that share their reads must all call it.
        super()._copy(key, stored)


def _mean(tensor: Tensor, dim: int) -> Tensor:
    """Return the mean over a dimension, which is kept; its bits do not depend on the number of threads."""
    if tensor.is_meta:
        return tensor.narrow(dim, 0, 1)
    # In numpy, because the order of torch's sum depends on the number of threads.
    return torch.from_numpy(tensor.numpy().mean(axis=dim, dtype=np.float64, keepdims=True)).float()


class SharedWeights(StoredWeights):
    """Stored tensors that one rank of each node reads and sends to the others, in chunks of rows.

    Each byte is read once for a node, and sent in the type of the file. A rank holds a chunk beside its part. All ranks
    of the node must make the same calls, with the same keys.

    Raises:
        OSError, SafetensorError: a file is damaged; on every rank of the node.
    """

    def __init__(self, files: Sequence[str | Path], node: NodeRanks) -> None:
        self._node = node
        self._paths = files
        self._opened: StoredWeights | None = None  # of the reader

        # Only the reader of the node runs it; the others get shapes and names of types.
        def open_files() -> dict[str, tuple[tuple[int, ...], str]]:
            self._opened = opened = StoredWeights(files)
            return {
                key: (shape, str(opened.dtypes[key]).removeprefix("torch.")) for key, shape in opened.shapes.items()
            }

        described = node.read(open_files)
        self.shapes = {key: tuple(shape) for key, (shape, _) in described.items()}
        # Messages between ranks cannot hold types of torch, so these travel by name.
        self.dtypes = {key: getattr(torch, name) for key, (_, name) in described.items()}

    def again(self) -> StoredWeights:
        # A later read is of this rank alone: the others of the node may not need the same tensor.
        return StoredWeights(self._paths)

    def wanted(self, needed: Sequence[bool]) -> Sequence[bool]:
        return self._node.any_of(needed)

    def equal(self, key: str, other: str) -> bool:
        same: bool = self._node.read(lambda: self._reader.equal(key, other))
        return same

    @property
    def _reader(self) -> StoredWeights:
        assert self._opened is not None, "another rank reads"
        return self._opened

    def _copy(self, key: str, targets: Sequence[tuple[Index, Tensor]]) -> None:
        num_rows = self.shapes[key][0] if self.shapes[key] else 1
        for start, chunk in self._chunks(key):
            for index, target in targets:
                part, *columns = index or (slice(0, num_rows),)
                # The rows that both the chunk and the target have; perhaps none.
                first, last = max(part.start, start), min(part.stop, start + len(chunk))
                if first < last:
                    own_rows = (slice(first - start, last - start), *columns)
                    # `_chunks` yields a scalar as one row, so a scalar target needs that dimension too.
                    rows = target if target.dim() else target.view(1)
                    rows[first - part.start : last - part.start] = chunk[own_rows]

    def _chunks(self, key: str) -> Iterator[tuple[int, Tensor]]:
        """Yield the rows of a tensor in chunks, each with the index of its first row; a scalar is one row."""
        num_rows, *columns = self.shapes[key] or (1,)
        dtype = self.dtypes[key]
        # From shape and type alone, so that all ranks of the node agree on the chunks.
        step = max(1, _CHUNK_BYTES // max(1, torch.Size(columns).numel() * dtype.itemsize))
        for start in range(0, num_rows, step):
            stop = min(num_rows, start + step)
            read = partial(lambda *rows: self._reader.rows(key, *rows), start, stop)  # another rank has no reader
            yield start, self._node.read_tensor(read, (stop - start, *columns), dtype)


class CountedWeights(StoredWeights):
    """Stored tensors that are returned on `meta`; the bytes of each file that would be read are counted."""

    device = "meta"

    def __init__(self, files: Sequence[str | Path]) -> None:
        super().__init__(files)
        self.num_bytes: Counter[str] = Counter()

    def _copy(self, key: str, targets: Sequence[tuple[Index, Tensor]]) -> None:
        for _, target in targets:
            self.num_bytes[Path(self._files[key]).name] += target.numel() * self.dtypes[key].itemsize


def _slices_of_part(
    shape: Sequence[int], placement: ParameterPlacement, cut: ModelCut
) -> tuple[list[int], list[tuple[int, tuple[int, int], Index]]]:
    """Return the shape of a rank's part of a stored tensor, and the slices of that tensor in it.

    Each slice has its dimension, its start and length there in the part, and its index in the stored tensor.
    """
    if placement.splits:
        (split,) = placement.splits
        group = cut.group_of(split)
        dim, blocks = split.dim or 0, split.blocks
        width, ranges = ranges_of_part(shape[dim], split, index_in_group(group), group_size(group))
    else:
        dim, blocks, width, ranges = 0, 1, shape[0], [(0, shape[0])]
    # A part has its range of each block one behind the other, such as of query, key and value in one matrix.
    extent = [*shape[:dim], blocks * width, *shape[dim + 1 :]]
    shard = cut.share_of(placement)
    first, last = shard.bounds(extent) if shard is not None else (0, extent[0])
    extent[0] = last - first
    slices = []
    for block, (start, stop) in enumerate(ranges):
        place = block * width  # of the block in the part
        if dim == 0:  # only the rows of the shard
            start, stop = max(start, start + first - place), min(stop, start + last - place)
            # Places in the part count from the first row of the shard.
            place = max(place - first, 0)
        if start < stop and first < last:
            before = [slice(first, last), *[slice(None)] * (dim - 1)] if dim else []
            slices.append((dim, (place, stop - start), (*before, slice(start, stop))))
    return extent, slices
