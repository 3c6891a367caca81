"""Stored tensors with other shapes or names than in their files: without a head, and with rows of new tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from trainer.models.stored_weights import Index, StoredWeights


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
