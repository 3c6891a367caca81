"""Trained rows of a frozen embedding, and of the output head over the same vocabulary.

The rows are a child module of their layer, and replace the results of the layer for their tokens, with those of its
low-rank product. They are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.parallel.communication import copy_to_group
from trainer.parallel.groups import Group, index_in_group
from trainer.parallel.tensor.kinds import ROWS


@dataclass(frozen=True)
class VectorScale:
    """The factor of an embedding that multiplies its vectors; `is_rounded`: it has the type of the vectors."""

    number: float = 1.0
    is_rounded: bool = False

    def __call__(self, vectors: Tensor) -> Tensor:
        """Return the vectors `[..., hidden]` of an embedding, multiplied."""
        if self.number == 1.0:
            return vectors
        return vectors * (vectors.new_full((), self.number) if self.is_rounded else self.number)


class TrainedRows(nn.Module):
    """The rows `[tokens, hidden]` of some tokens of a vocabulary.

    Args:
        ids: the ids of their tokens, in ascending order.
    """

    ids: Tensor

    def __init__(self, rows: Tensor, ids: Sequence[int]) -> None:
        super().__init__()
        self.rows = nn.Parameter(rows)
        self.register_buffer("ids", torch.tensor(ids, dtype=torch.int64, device="cpu"))

    def extra_repr(self) -> str:
        return f"tokens={len(self.ids)}"


class TrainedVectors(TrainedRows):
    """Trained rows of an embedding.

    Args:
        rows, ids: see `TrainedRows`.
        padding: the index of the row without a gradient, that of the padding token; None: there is none.
    """

    def __init__(
        self,
        rows: Tensor,
        ids: Sequence[int],
        padding: int | None = None,
        scale: VectorScale = VectorScale(),
    ) -> None:
        super().__init__(rows, ids)
        self.padding = padding
        self.scale = scale

    def forward(self, ids: Tensor, vectors: Tensor) -> Tensor:
        """Return the vectors `[*, hidden]` of `ids` `[*]`, with trained rows in place of those of their tokens."""
        # A token without a trained row gets the place of another one, and `where` keeps its vector.
        place = torch.searchsorted(self.ids, ids).clamp_max(len(self.ids) - 1)
        own = self.scale(F.embedding(place, self.rows, self.padding))
        return torch.where((self.ids[place] == ids).unsqueeze(-1), own, vectors)

    def copy(self) -> TrainedVectors:
        return TrainedVectors(self.rows.detach().clone(), self.ids.tolist(), self.padding, self.scale)


class TrainedLogits(TrainedRows):
    """Trained rows of a head over a vocabulary.

    Args:
        rows, ids: see `TrainedRows`.
        group: the ranks with equal parts of the vocabulary, one after the other.
        num_columns: the number of columns of each part; not used on one rank.
    """

    own: Tensor
    columns: Tensor

    def __init__(self, rows: Tensor, ids: Sequence[int], group: Group = None, num_columns: int = 0) -> None:
        super().__init__(rows, ids)
        self._group = group
        first = index_in_group(group) * num_columns
        # The trained tokens with columns on this rank; all ranks hold all trained rows.
        own = [index for index, token in enumerate(ids) if group is None or first <= token < first + num_columns]
        for name, numbers in (("own", own), ("columns", [ids[index] - first for index in own])):
            self.register_buffer(name, torch.tensor(numbers, dtype=torch.int64, device="cpu"), persistent=False)

    def forward(self, hidden: Tensor, logits: Tensor, bias: Tensor | None) -> Tensor:
        """Return the logits `[*, columns]`, with new ones for the tokens; they change in place, because they are large.

        Args:
            hidden: the inputs of the head, `[*, hidden]`.
        """
        # A rank uses some of the rows, so the gradient of all is a sum over the ranks.
        rows = copy_to_group(self.rows, self._group).index_select(0, self.own)
        new = F.linear(hidden, rows, None if bias is None else bias[self.columns])
        return logits.index_copy_(-1, self.columns, new.to(logits.dtype))

    def copy(self, group: Group, num_columns: int) -> TrainedLogits:
        """Return a copy with a parameter of its own, for this rank's columns."""
        return TrainedLogits(self.rows.detach().clone(), self.ids.tolist(), group, num_columns)


def attach_rows(layer: nn.Module, rows: TrainedVectors | TrainedLogits) -> None:
    """Replace the results of an embedding or a head by trained rows, after those of hooks that it has already."""
    setattr(layer, ROWS, rows)
    layer.register_forward_hook(_replace_vectors if isinstance(rows, TrainedVectors) else _replace_logits)


def rows_of(layer: nn.Module) -> Any:
    """Return the trained rows of a layer; None without any."""
    return getattr(layer, ROWS, None)


def _replace_vectors(layer: nn.Module, args: Any, vectors: Tensor) -> Tensor:
    replaced: Tensor = rows_of(layer)(args[0], vectors)
    return replaced


def _replace_logits(head: Any, args: Any, logits: Tensor) -> Tensor:
    replaced: Tensor = rows_of(head)(args[0], logits, head.bias)
    return replaced
