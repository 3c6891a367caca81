"""Masking of tokens for masked language models, a function of seed, epoch, row and position only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.base.errors import UsageError
from trainer.parallel.microbatch import IGNORED_LABEL
from trainer.parallel.random import row_keys, stream_key, uniforms
from trainer.tasks.types import Tokenizer

_REPLACED, _DRAWN = 0.8, 0.1  # shares of chosen tokens that become the mask token and a random token


@dataclass(frozen=True, eq=False)
class Masking:
    """Masking of tokens: 80 % of the chosen tokens become the mask token, 10 % a random token, 10 % stay unchanged.

    The masking has no state and no random generator. Every rank, worker, microbatch and resumed run therefore masks
    the same tokens. Special tokens, which include padding, are neither chosen nor drawn as random tokens.

    Source: Devlin et al. 2019, arXiv:1810.04805, section 3.1. New masks in every epoch: Liu et al. 2019,
    arXiv:1907.11692, section 4.1.
    """

    seed: int
    probability: float  # the probability to choose a token, in (0, 1)
    mask_token: int  # the id of the mask token
    special_tokens: Tensor  # the ids of special tokens, int64 `[special]`
    ordinary_tokens: Tensor  # the ids from which random tokens are drawn, int64 `[ordinary]`

    @classmethod
    def of(cls, tokenizer: Tokenizer, probability: float, seed: int) -> Masking:
        """Return the masking for a tokenizer.

        Raises:
            UsageError: the tokenizer has no mask token.
        """
        if tokenizer.mask_token_id is None:
            raise UsageError(
                "`task.type` may be masked_lm only for a tokenizer with a mask token, but that of"
                f" `{tokenizer.name_or_path}` has none; use a model that was trained with one, such as BERT, or name"
                " a tokenizer with one in `model.tokenizer`"
            )
        added = (number for number, token in tokenizer.added_tokens_decoder.items() if token.special)
        # Added tokens may be special without a role, and so be missing in `all_special_ids`.
        special = {*tokenizer.all_special_ids, *added}
        ordinary = sorted({*tokenizer.get_vocab().values()} - special)
        return cls(seed, probability, tokenizer.mask_token_id, torch.tensor(sorted(special)), torch.tensor(ordinary))

    def __call__(self, input_ids: Tensor, rows: Tensor, epoch: int | None) -> tuple[Tensor, Tensor]:
        """Mask tokens of rows.

        Args:
            input_ids: the token ids, int64 `[batch, sequence]`.
            rows: the index of each row in its split, int64 `[batch]`.
            epoch: the epoch, from 0; None: the fixed masking of an evaluation.

        Returns:
            The input ids for the model, and the labels, both int64 `[batch, sequence]`. A label is the true id of a
            chosen token, and `IGNORED_LABEL` elsewhere.
        """
        key = stream_key(self.seed, "masking", "evaluation" if epoch is None else epoch)
        # Two numbers for each position, side by side: a wider batch has other padding, but the same masks.
        draws = uniforms(row_keys(key, rows), torch.arange(2 * input_ids.shape[1]))
        choice, token = draws.view(*input_ids.shape, 2).unbind(-1)
        chosen = (choice < self.probability) & ~torch.isin(input_ids, self.special_tokens)
        # The same number decides twice, which saves a third draw.
        share = choice / self.probability  # uniform in [0, 1) for chosen tokens
        # `token` is below 1 with 53 bits, so fp64 does not round the product up to the number of tokens.
        random = self.ordinary_tokens[(token * len(self.ordinary_tokens)).long()]
        hidden = torch.where(
            share < _REPLACED, self.mask_token, torch.where(share < _REPLACED + _DRAWN, random, input_ids)
        )
        return torch.where(chosen, hidden, input_ids), input_ids.masked_fill(~chosen, IGNORED_LABEL)
