"""Masking of tokens for masked language models, a function of seed, epoch, row and position only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainer.base.errors import UsageError
from trainer.features.masked_lm.draws import uniforms
from trainer.features.masked_lm.units import Spans, Words
from trainer.parallel.microbatch import IGNORED_LABEL
from trainer.parallel.random import row_keys, stream_key
from trainer.recipe.schema.schedule import half_cosine
from trainer.tasks.types import Tokenizer


@dataclass(frozen=True, eq=False)
class Masking:
    """Masking of tokens: chosen tokens become the mask token, a random token, or stay unchanged.

    The masking has no state and no random generator. Every rank, worker, microbatch and resumed run therefore masks
    the same tokens. Special tokens, which include padding, are neither chosen nor drawn as random tokens.

    Source: Devlin et al. 2019, arXiv:1810.04805, section 3.1. New masks in every epoch: Liu et al. 2019,
    arXiv:1907.11692, section 4.1. Rates that fall during a training: Yang et al. 2023, arXiv:2208.10806.
    """

    seed: int
    probability: float  # the probability to choose a token, in (0, 1)
    mask_token: int  # the id of the mask token
    special_tokens: Tensor  # the ids of special tokens, int64 `[special]`
    ordinary_tokens: Tensor  # the ids from which random tokens are drawn, int64 `[ordinary]`
    shares: Sequence[float] = (0.8, 0.1, 0.1)  # of chosen tokens: the mask token, a random token, unchanged
    units: Words | None = None  # chooses words or spans; None: each token by itself
    last: float | None = None  # the probability in the last step, and in evaluations; None: the same in each step
    is_cosine: bool = False  # the curve from `probability` to `last`; else a line

    @classmethod
    def of(cls, tokenizer: Tokenizer, probability: float, seed: int, units: str = "tokens") -> Masking:
        """Return the masking for a tokenizer.

        Raises:
            UsageError: the tokenizer has no mask token, or does not mark where words begin.
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
        found = {"words": Words, "spans": Spans}[units].of(tokenizer) if units != "tokens" else None
        ids = torch.tensor(sorted(special)), torch.tensor(ordinary)
        return cls(seed, probability, tokenizer.mask_token_id, *ids, units=found)

    def at(self, step: int, total_steps: int) -> Masking:
        """Return the masking of a step, from 0: the first one has `probability`, and the last one `last`."""
        if self.last is None:
            return self
        done = step / max(1, total_steps - 1)
        left = half_cosine(done) if self.is_cosine else 1.0 - done
        return replace(self, probability=self.last + (self.probability - self.last) * left)

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
        named = "evaluation" if epoch is None else epoch
        keys = row_keys(stream_key(self.seed, "masking", named), rows)
        probability = self.probability if epoch is not None or self.last is None else self.last
        # Two numbers for each position, side by side: a wider batch has other padding, but the same masks.
        draws = uniforms(keys, torch.arange(2 * input_ids.shape[1]))
        choice, token = draws.view(*input_ids.shape, 2).unbind(-1)
        is_special = torch.isin(input_ids, self.special_tokens)
        if self.units is None:
            chosen = (choice < probability) & ~is_special
            # The same number decides twice, which saves a third draw.
            share = choice / probability  # uniform in [0, 1) for chosen tokens
        else:
            keys = row_keys(stream_key(self.seed, "masked units", named), rows)
            chosen, share = self.units(input_ids, is_special, keys, probability)
        # `token` is below 1 with 53 bits, so fp64 does not round the product up to the number of tokens.
        random = self.ordinary_tokens[(token * len(self.ordinary_tokens)).long()]
        masked, drawn, _ = self.shares
        hidden = torch.where(share < masked, self.mask_token, torch.where(share < masked + drawn, random, input_ids))
        return torch.where(chosen, hidden, input_ids), input_ids.masked_fill(~chosen, IGNORED_LABEL)
