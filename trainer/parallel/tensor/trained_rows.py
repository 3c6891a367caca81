"""Trained rows of a frozen embedding, and of the output head over the same vocabulary.

The rows are a child module of their layer, and replace the results of the layer for their tokens, with those of its
low-rank product. They are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer.parallel.groups import Group
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

    def replaced(self, layer: Any, inputs: Tensor, results: Tensor) -> Tensor:
        """Return the results of a layer `[*, ...]`, with those of trained rows for their tokens."""
        raise NotImplementedError

    def copy(self, group: Group, num_columns: int) -> TrainedRows:
        """Return a copy with a parameter of its own, for a rank with `num_columns` columns of the vocabulary."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"tokens={len(self.ids)}"


def attach_rows(layer: nn.Module, rows: TrainedRows) -> None:
    """Replace the results of an embedding or a head by trained rows, after those of hooks that it has already."""
    setattr(layer, ROWS, rows)
    layer.register_forward_hook(_replace)


def rows_of(layer: nn.Module) -> Any:
    """Return the trained rows of a layer; None without any."""
    return getattr(layer, ROWS, None)


def _replace(layer: nn.Module, args: Any, results: Tensor) -> Tensor:
    replaced: Tensor = rows_of(layer).replaced(layer, args[0], results)
    return replaced
