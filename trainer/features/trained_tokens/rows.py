"""Trained rows of an embedding, and of a head over the same vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.parallel.communication import copy_to_group
from trainer.parallel.groups import Group, index_in_group
from trainer.parallel.tensor.trained_rows import TrainedRows, VectorScale


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
        scale: VectorScale | None = None,
    ) -> None:
        super().__init__(rows, ids)
        self.padding = padding
        self.scale = scale or VectorScale()

    def forward(self, ids: Tensor, vectors: Tensor) -> Tensor:
        """Return the vectors `[*, hidden]` of `ids` `[*]`, with trained rows in place of those of their tokens."""
        # A token without a trained row gets the place of another one, and `where` keeps its vector.
        place = torch.searchsorted(self.ids, ids).clamp_max(len(self.ids) - 1)
        own = self.scale(F.embedding(place, self.rows, self.padding))
        return torch.where((self.ids[place] == ids).unsqueeze(-1), own, vectors)

    def replaced(self, layer: Any, inputs: Tensor, results: Tensor) -> Tensor:
        found: Tensor = self(inputs, results)
        return found

    def copy(self, group: Group, num_columns: int) -> TrainedVectors:
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

    def replaced(self, layer: Any, inputs: Tensor, results: Tensor) -> Tensor:
        found: Tensor = self(inputs, results, layer.bias)
        return found

    def copy(self, group: Group, num_columns: int) -> TrainedLogits:
        return TrainedLogits(self.rows.detach().clone(), self.ids.tolist(), group, num_columns)
