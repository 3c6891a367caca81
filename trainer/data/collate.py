"""Collation of rows into the tensors of one microbatch: padding of texts, or another `Batching`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.base.errors import UsageError
from trainer.data.order import IndexArray
from trainer.data.split import EncodedSplit, FlatArray
from trainer.parallel.microbatch import IGNORED_LABEL, Microbatch, TokenMasking

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Batching(Protocol):
    """Conversion of rows to the input tensors of a microbatch."""

    def inputs(
        self, split: EncodedSplit, row_ids: IndexArray, as_wide_as: IndexArray | None = None
    ) -> dict[str, Tensor]:
        """Return the columns of the rows that are not scalars, each of shape `[batch, ...]`.

        Args:
            row_ids: the indices of the rows, of shape `[batch]`.
            as_wide_as: the rows that decide the length of padded rows; None: `row_ids`.
        """
        ...


@dataclass(frozen=True)
class Padding:
    """Padding of texts on the right, to a multiple of `multiple_of` tokens."""

    token_id: int
    token_type_id: int = 0
    multiple_of: int = 1

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, multiple_of: int = 1) -> Padding:
        """Return the padding for a tokenizer.

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
        """Return the padding value of `column`."""
        fills = {
            "input_ids": self.token_id,
            "decoder_input_ids": self.token_id,
            "token_type_ids": self.token_type_id,
            "labels": IGNORED_LABEL,
        }
        return fills.get(column, 0)

    def inputs(
        self, split: EncodedSplit, row_ids: IndexArray, as_wide_as: IndexArray | None = None
    ) -> dict[str, Tensor]:
        """Return the rows, padded to the longest: int64 `[batch, sequence]`, or `[batch, texts_per_row, sequence]`.

        `attention_mask` is 0 for padding and 1 for tokens. Ragged columns are padded to their own longest row.
        Arrays stay as they are.
        """
        widest = row_ids if as_wide_as is None else as_wide_as
        num_texts, texts = split.texts_per_row, split.texts_of(row_ids).ravel()
        flat, is_token = self._places(split.offsets, texts, int(split.lengths_of(widest).max()))
        shape = (len(row_ids), num_texts, -1) if num_texts > 1 else (len(row_ids), -1)
        features = {name: _pad(values, flat, is_token, self.value(name)) for name, values in split.tokens.items()}
        features["attention_mask"] = torch.from_numpy(is_token.astype(np.int64))
        features = {name: tensor.view(shape) for name, tensor in features.items()}
        for name, column in split.ragged.items():
            flat, is_token = self._places(column.offsets, row_ids, int(column.lengths_of(widest).max()))
            features[name] = _pad(column.values, flat, is_token, self.value(name))
        arrays = {name: torch.from_numpy(values[row_ids]) for name, values in split.arrays.items()}
        return features | arrays

    def _places(self, offsets: IndexArray, texts: IndexArray, longest: int) -> tuple[IndexArray, NDArray[np.bool_]]:
        """Return the places of tokens in flat columns, and which elements of `[texts, sequence]` are tokens."""
        columns = np.arange(-(-longest // self.multiple_of) * self.multiple_of)
        # Tokens come first and padding after them, for all texts at once.
        is_token = columns < (offsets[texts + 1] - offsets[texts])[:, None]
        return (offsets[texts, None] + columns)[is_token], is_token


def collate(
    split: EncodedSplit,
    row_ids: IndexArray,
    batching: Batching,
    places: IndexArray,
    filler: bool = False,
    masking: TokenMasking | None = None,
    epoch: int | None = None,
    as_wide_as: IndexArray | None = None,
) -> Microbatch:
    """Collate rows into one microbatch.

    Args:
        row_ids: the indices of the rows, of shape `[batch]`.
        places: the value of `Microbatch.rows`, of shape `[batch]`.
        masking: makes the labels from the tokens; None: the labels are the column `labels` of the split.
        epoch: the epoch of these rows, from 0, for the masking; None: an evaluation.
        as_wide_as: the rows that decide the length of padded rows, as in `Batching.inputs`.
    """
    scalars = {name: torch.from_numpy(np.asarray(values[row_ids])) for name, values in split.scalars.items()}
    features = batching.inputs(split, row_ids, as_wide_as) | scalars
    if masking is None:  # rows to predict have no labels
        labels = features.pop("labels", torch.empty(len(row_ids), 0))
    else:  # keyed by row ids, which are the same under every layout
        features["input_ids"], labels = masking(features["input_ids"], torch.from_numpy(row_ids), epoch)
    return Microbatch(features, labels, torch.from_numpy(places), filler)


def _pad(values: FlatArray, flat: IndexArray, is_token: FlatArray, fill: int) -> Tensor:
    # int64, because the cross entropy of torch takes no other integers as labels.
    padded = np.full(is_token.shape, fill, np.int64)
    padded[is_token] = values[flat]
    return torch.from_numpy(padded)
