"""Tensors of safetensors files, read in part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from trainer.models.place import ModelCut
from trainer.parallel.groups import group_size, index_in_group
from trainer.parallel.placement import ParameterPlacement
from trainer.parallel.shards.slices import ranges_of_part

_CHUNK_ELEMENTS = 1 << 22  # compared at once

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


@dataclass
class Sources:
    """The tensors of a checkpoint that fill the parameters and buffers of a model."""

    renamed: dict[str, str] = field(default_factory=dict)  # name in the model: key in the checkpoint
    converted: list[list[str]] = field(default_factory=list)  # groups of keys that are merged or split together
    missing: list[str] = field(default_factory=list)  # names in the model
    notes: list[str] = field(default_factory=list)
