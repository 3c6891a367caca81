"""The tokens of padded rows, joined without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.parallel.copying import to_device

_ALIKE = 0.75
"""The length of the shortest row of a group, relative to the longest, on a CPU."""


@dataclass(frozen=True)
class RowGroup:
    """Rows of similar length that attention processes together, padded to the longest of them.

    Their tokens are next to each other.
    """

    rows: Tensor  # the places of the rows in the microbatch, int64 `[rows]`
    tokens: slice  # the places of their tokens in the joined sequence
    width: int  # the tokens of the longest row
    # the place of each token in the flattened rows `[rows * width]`, int64; None: all rows are of one length
    places: Tensor | None
    is_token: Tensor | None  # whether a position of a row has a token, bool `[rows, width]`; None: all have one

    def pad(self, x: Tensor) -> Tensor:
        """Return the rows `[rows, width, ...]` of `x` `[1, tokens, ...]`, with zeros as padding."""
        tokens = x[0, self.tokens]
        shape = (len(self.rows), self.width, *x.shape[2:])
        if self.places is None:
            return tokens.reshape(shape)
        return x.new_zeros(shape).flatten(0, 1).index_copy(0, self.places, tokens).view(shape)

    def join(self, x: Tensor) -> Tensor:
        """Return the tokens `[tokens, ...]` of these rows, `x` `[rows, width, ...]`."""
        flat = x.flatten(0, 1)
        return flat if self.places is None else flat.index_select(0, self.places)

    def mask(self, window: int | None, is_causal: bool) -> Tensor | None:
        """Return the mask of the padded rows, bool (True: visible) `[rows or 1, 1, width or 1, width]`; None: no mask.

        Args:
            window: the largest distance of a query and a key that it sees; None: any.
            is_causal: whether a query sees no key at a later position. Without padding and window, the mask leaves that
                to its reader.
        """
        if self.is_token is None and window is None:
            return None
        positions = torch.arange(self.width, device=self.rows.device)
        distances = (positions[:, None] - positions)[None, None]
        # The mask hides keys only: queries of padding have outputs too, which `join` drops.
        mask = torch.ones_like(positions, dtype=torch.bool) if self.is_token is None else self.is_token[:, None, None]
        if window is not None:
            mask = mask & (distances.abs() <= window)
        if is_causal:
            mask = mask & (distances >= 0)
        return mask


@dataclass(frozen=True)
class FlatRows:
    """The tokens of a microbatch as one sequence, row after row."""

    rows: Tensor  # the row of each token, int64 `[tokens]`
    positions: Tensor  # the position of each token in its row, int64 `[tokens]`
    places: Tensor  # the place of each token in the flattened padded rows `[batch * positions]`, int64 `[tokens]`
    shape: tuple[int, int]  # the rows and positions of the padded microbatch
    order: Tensor  # the rows in the order of the sequence, int64 `[batch]`
    lengths: tuple[int, ...]  # their numbers of tokens

    @classmethod
    def of(cls, lengths: Sequence[int], width: int, device: torch.device) -> FlatRows:
        """Return the tokens of a microbatch.

        The longest rows come first.

        Args:
            lengths: the tokens of each row, padded on the right, `[batch]`.
            width: the positions of the padded rows.
        """
        # Stable, so that rows of equal length keep their order.
        order = np.argsort([-length for length in lengths], kind="stable")
        ordered = np.asarray(lengths)[order]
        rows, starts = order.repeat(ordered), ordered.cumsum() - ordered
        positions = np.arange(len(rows)) - starts.repeat(ordered)
        return cls(
            _moved(rows, device),
            _moved(positions, device),
            _moved(rows * width + positions, device),
            (len(order), width),
            _moved(order, device),
            tuple(ordered.tolist()),
        )

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """The place of the first token of each row in the sequence, and the number of all tokens."""
        return (0, *accumulate(self.lengths))

    @cached_property
    def starts(self) -> Tensor:
        """`bounds` on the device of the model, int32 `[batch + 1]`."""
        return _moved(np.array(self.bounds, dtype=np.int32), self.rows.device)

    @property
    def groups(self) -> tuple[RowGroup, ...]:
        """The rows by their length, in the order of the sequence: a CPU takes those of similar length, a GPU all."""
        return self._groups

    @cached_property
    def _groups(self) -> tuple[RowGroup, ...]:
        device, lengths = self.rows.device, np.asarray(self.lengths)
        groups = []
        for first, end in pairwise(_cuts(self.lengths, 0.0 if device.type == "cuda" else _ALIKE)):
            longest = self.lengths[first]
            mask = np.arange(longest) < lengths[first:end, None]
            places = is_token = None
            if not mask.all():
                places, is_token = _moved(np.flatnonzero(mask), device), _moved(mask, device)
            groups.append(
                RowGroup(self.order[first:end], slice(self.bounds[first], self.bounds[end]), longest, places, is_token)
            )
        return tuple(groups)

    @cached_property
    def of_any_length(self) -> AnyRows:
        """The same rows for compiled layers."""
        rows = AnyRows(self.rows, self.positions, self.places, self.shape, self.order, (max(self.lengths),))
        vars(rows)["starts"] = self.starts
        return rows

    def join(self, x: Tensor) -> Tensor:
        """Return the tokens `[1, tokens, ...]` of `x` `[batch, positions, ...]`; a batch of 1 stands for all rows."""
        places = self.places if len(x) == self.shape[0] else self.positions
        # No view, unlike a result that is unsqueezed: a compiler would make another graph for the layer behind it.
        return x.flatten(0, 1).unsqueeze(0).index_select(1, places)

    def pad(self, x: Tensor) -> Tensor:
        """Return the padded rows `[batch, positions, ...]` of `x` `[1, tokens, ...]`, with zeros as padding."""
        shape = (*self.shape, *x.shape[2:])
        return x.new_zeros(shape).flatten(0, 1).index_copy(0, self.places, x.squeeze(0)).view(shape)


class AnyRows(FlatRows):
    """Rows in a graph that holds for rows of other lengths: `lengths` has the longest only, and `starts` is given."""

    @property
    def groups(self) -> tuple[RowGroup, ...]:
        """All rows, padded to the longest, in the order of the microbatch."""
        (longest,), number = self.lengths, self.shape[0]
        places = self.rows * longest + self.positions
        is_token = places.new_zeros(number * longest, dtype=torch.bool).index_fill(0, places, True)
        rows = torch.arange(number, device=places.device)
        return (RowGroup(rows, slice(None), longest, places, is_token.view(number, longest)),)


def _cuts(lengths: Sequence[int], alike: float) -> list[int]:
    """Return the first row of each group of descending lengths, and the number of rows with a token."""
    number = sum(length > 0 for length in lengths)
    cuts: list[int] = []
    for index, length in enumerate(lengths[:number]):
        if not cuts or length < alike * lengths[cuts[-1]]:
            cuts.append(index)
    # Rows without a token are the last ones, and belong to no group.
    return [*cuts, number]


def _moved(array: NDArray[Any], device: torch.device) -> Tensor:
    return to_device(torch.from_numpy(array), device)
