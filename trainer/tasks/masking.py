"""Which tokens a masked language model has to guess: a function of seed, epoch, row and position, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.base.errors import UsageError
from trainer.parallel.microbatch import IGNORED_LABEL
from trainer.parallel.random import element_keys, stream_key, uniforms
from trainer.tasks.types import Tokenizer

_REPLACED, _DRAWN = 0.8, 0.1  # of the chosen tokens, by the mask token and by a random one; the rest stays


@dataclass(frozen=True, eq=False)
class Masking:
    """Chooses tokens and hides them: 80 % become the mask token, 10 % a random token, 10 % stay as they are.

    Nothing is remembered and no generator is asked, so that every rank, worker and microbatch finds the same tokens
    hidden, and a resumed run too. Special tokens, padding among them, are neither chosen nor put in.

    Source: Devlin et al. 2019, arXiv:1810.04805, section 3.1; masked anew in every epoch: Liu et al. 2019,
    arXiv:1907.11692, section 4.1.

    Args:
        seed: the recipe's.
        probability: of each token to be chosen, in (0, 1).
        mask_token: its id.
        special_tokens: ids, int64 `[special]`.
        ordinary_tokens: ids to draw random tokens from, int64 `[ordinary]`.
    """

    seed: int
    probability: float
    mask_token: int
    special_tokens: Tensor
    ordinary_tokens: Tensor

    @classmethod
    def of(cls, tokenizer: Tokenizer, probability: float, seed: int) -> Masking:
        """That of a tokenizer.

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
        special = {*tokenizer.all_special_ids, *added}
        ordinary = sorted({*tokenizer.get_vocab().values()} - special)
        return cls(seed, probability, tokenizer.mask_token_id, torch.tensor(sorted(special)), torch.tensor(ordinary))

    def __call__(self, input_ids: Tensor, rows: Tensor, epoch: int | None) -> tuple[Tensor, Tensor]:
        """Hides tokens of rows.

        Args:
            input_ids: int64 `[batch, sequence]`.
            rows: the place of each row in its split, int64 `[batch]`.
            epoch: from 0; None: the one masking of a split that is evaluated.

        Returns:
            The ids that the model is given, and the labels: the true id of each chosen token, `IGNORED_LABEL`
            elsewhere; both int64 `[batch, sequence]`.
        """
        key = stream_key(self.seed, "masking", "evaluation" if epoch is None else epoch)
        draws = uniforms(element_keys(key, rows, (), ()), torch.arange(2 * input_ids.shape[1]))
        choice, token = draws.view(*input_ids.shape, 2).unbind(-1)
        chosen = (choice < self.probability) & ~torch.isin(input_ids, self.special_tokens)
        share = choice / self.probability  # in [0, 1) where a token is chosen, and evenly so
        random = self.ordinary_tokens[(token * len(self.ordinary_tokens)).long()]
        hidden = torch.where(
            share < _REPLACED, self.mask_token, torch.where(share < _REPLACED + _DRAWN, random, input_ids)
        )
        return torch.where(chosen, hidden, input_ids), input_ids.masked_fill(~chosen, IGNORED_LABEL)
