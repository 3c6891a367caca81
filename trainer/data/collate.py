"""From rows of a split to the padded tensors of one microbatch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from trainer.data.order import IndexArray
from trainer.data.split import EncodedSplit, FlatArray
from trainer.errors import UsageError
from trainer.parallel.microbatch import IGNORED_LABEL, Microbatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TokenMasking(Protocol):
    """What this room needs of a task whose labels are its tokens; as `trainer.tasks.masking.Masking`."""

    def __call__(self, input_ids: Tensor, rows: Tensor, epoch: int | None) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class Padding:
    """What fills short rows (on the right), and to which lengths."""

    token_id: int
    token_type_id: int = 0
    multiple_of: int = 1

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, multiple_of: int = 1) -> Padding:
        """That of a tokenizer.

        Raises:
            UsageError: the tokenizer has no padding token.
        """
        if tokenizer.pad_token_id is None:
            raise UsageError(
                f"the tokenizer `{tokenizer.name_or_path}` has no padding token, which batches of texts need;"
                ' add "pad_token" to the `tokenizer_config.json` of a copy and name its folder in `model.tokenizer`'
            )
        return cls(tokenizer.pad_token_id, tokenizer.pad_token_type_id, multiple_of)

    def value(self, column: str) -> int:
        """What fills `column`."""
        fills = {"input_ids": self.token_id, "token_type_ids": self.token_type_id, "labels": IGNORED_LABEL}
        return fills.get(column, 0)


def collate(
    split: EncodedSplit,
    row_ids: IndexArray,
    padding: Padding,
    places: IndexArray,
    filler: bool = False,
    masking: TokenMasking | None = None,
    epoch: int | None = None,
    width: int = 0,
) -> Microbatch:
    """Pads rows to the longest of them, or to more.

    Args:
        split: the tokenised split.
        row_ids: the rows `[batch]`.
        padding: how to pad.
        places: what becomes `Microbatch.rows` `[batch]`.
        filler: what becomes `Microbatch.filler`.
        width: the least length.
        masking: makes the labels of the rows from their tokens; None: they are in the split.
        epoch: of these rows, from 0, for the masking; None: they are evaluated.

    Returns:
        The microbatch: `attention_mask` is 1 on tokens and 0 on padding; each input is int64 `[batch, sequence]`.
    """
    lengths = split.lengths[row_ids]
    width = -(-max(width, int(lengths.max())) // padding.multiple_of) * padding.multiple_of
    columns = np.arange(width)
    is_token = columns < lengths[:, None]
    flat = (split.offsets[row_ids, None] + columns)[is_token]
    padded = {name: _pad(values, flat, is_token, padding.value(name)) for name, values in split.tokens.items()}
    scalars = {name: torch.from_numpy(np.asarray(values[row_ids])) for name, values in split.scalars.items()}
    features = padded | scalars
    if masking is None:
        labels = features.pop("labels")
    else:  # by row ids, which say the same under every layout
        features["input_ids"], labels = masking(features["input_ids"], torch.from_numpy(row_ids), epoch)
    features["attention_mask"] = torch.from_numpy(is_token.astype(np.int64))
    return Microbatch(features, labels, torch.from_numpy(places), filler)


def _pad(values: FlatArray, flat: IndexArray, is_token: FlatArray, fill: int) -> Tensor:
    padded = np.full(is_token.shape, fill, np.int64)
    padded[is_token] = values[flat]
    return torch.from_numpy(padded)
