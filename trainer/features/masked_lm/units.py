"""Words and spans of words that masking chooses as a whole."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.base.errors import UsageError
from trainer.data.order import IndexArray
from trainer.features.masked_lm.draws import uniforms
from trainer.tasks.types import Tokenizer

_INSIDE = "##"
"""The prefix by which WordPiece marks tokens inside of a word."""
_SPACES = ("Ġ", "Ċ", "ĉ", "č", "▁")
"""The first characters of tokens behind white space: in byte-level BPE, and in SentencePiece."""
_LONGEST, _STOP = 10, 0.2
_CHANCES = _STOP * (1 - _STOP) ** np.arange(_LONGEST)
SPAN_LENGTHS = _CHANCES / _CHANCES.sum()
"""The probability of spans of 1 to 10 words: geometric with 0.2; the mean is 3.8."""
_TRIES = 4  # spans to draw for each token of a row; most rows need a tenth of them


@dataclass(frozen=True, eq=False)
class Words:
    """Masking of whole words: all tokens of a word are chosen, or none.

    A token begins a word if it lacks the prefix ## in a WordPiece vocabulary; in byte-level BPE and SentencePiece, if
    white space precedes it. A word also begins behind a special token.

    Source: the whole-word masking of BERT (github.com/google-research/bert, 2019); Cui et al. 2021, arXiv:1906.08101.
    """

    begins: Tensor  # whether a token begins a word, bool `[tokens]`

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Any:
        """Return the words of a tokenizer.

        Raises:
            UsageError: no token of it has a mark of WordPiece, byte-level BPE or SentencePiece.
        """
        tokens = {number: token for token, number in tokenizer.get_vocab().items()}
        behind = {number: token.startswith(_SPACES) for number, token in tokens.items()}
        inside = {number: token.startswith(_INSIDE) and token != _INSIDE for number, token in tokens.items()}
        if not any(behind.values()) and not any(inside.values()):
            raise UsageError(
                "`task.mask_units` may be words or spans only for a tokenizer that marks where words begin, but that of"
                f" `{tokenizer.name_or_path}` has no token with ##, Ġ or ▁; use tokens"
            )
        # A byte-level vocabulary may hold some tokens such as ###.
        is_pieces = sum(inside.values()) > sum(behind.values())
        begins = torch.ones(max(tokens) + 1, dtype=torch.bool)
        for number in tokens:
            begins[number] = not inside[number] if is_pieces else behind[number]
        return cls(begins)

    def __call__(
        self, input_ids: Tensor, is_special: Tensor, keys: Tensor, probability: float
    ) -> tuple[Tensor, Tensor]:
        """Choose tokens of rows.

        Args:
            input_ids: the token ids, int64 `[batch, sequence]`.
            is_special: whether a token is special, and may not be chosen, bool `[batch, sequence]`.
            keys: the key of each row, int64 `[batch]`.

        Returns:
            Whether each token is chosen, bool, and a number in [0, 1), which decides what becomes of it; both
            `[batch, sequence]`.
        """
        draws = uniforms(keys, torch.arange(2 * input_ids.shape[1]))
        choice, share = draws.view(*input_ids.shape, 2).unbind(-1)
        # The number of the first token of a word decides for all of them.
        of_word = choice.gather(1, self.first_places(input_ids, is_special))
        return (of_word < probability) & ~is_special, share

    def first_places(self, input_ids: Tensor, is_special: Tensor) -> Tensor:
        """Return the place of the first token of the word of each token, int64 `[batch, sequence]`."""
        known = input_ids < len(self.begins)
        is_first = self.begins[input_ids.clamp(max=len(self.begins) - 1)] | ~known | is_special
        is_first[:, 1:] |= is_special[:, :-1]
        is_first[:, :1] = True
        places = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        return torch.where(is_first, places, 0).cummax(dim=1).values


class Spans(Words):
    """Masking of spans of whole words, until the tokens of the wanted share are chosen.

    A span begins with the word of a random token that is not chosen yet, and has 1 to 10 words. It ends before a
    special token. The number of tokens to choose is their share of the row, rounded at random to keep its mean. The
    last span is cut behind the word that reaches it. All tokens of a span become masks, or random tokens, or stay.

    Source: Joshi et al. 2020, SpanBERT, arXiv:1907.10529, section 3.1.
    """

    def __call__(
        self, input_ids: Tensor, is_special: Tensor, keys: Tensor, probability: float
    ) -> tuple[Tensor, Tensor]:
        firsts = self.first_places(input_ids, is_special).numpy()
        chosen, share = np.zeros(firsts.shape, bool), np.zeros(firsts.shape)
        for row, special in enumerate(is_special.numpy()):
            ordinary = np.flatnonzero(~special)
            if len(ordinary):
                # As many numbers as the row has tokens of its own, since padding differs between layouts.
                draws = uniforms(keys[row], torch.arange(1 + 3 * _TRIES * len(ordinary))).numpy()
                budget = math.floor(len(ordinary) * probability + draws[0])
                _choose(chosen[row], share[row], ordinary, firsts[row], draws[1:].reshape(-1, 3), budget)
        return torch.from_numpy(chosen), torch.from_numpy(share)


def _choose(
    chosen: NDArray[np.bool_], share: NDArray[np.float64], ordinary: IndexArray, firsts: IndexArray,
    draws: NDArray[np.float64], budget: int,
) -> None:  # fmt: skip
    """Choose tokens of one row, in place."""
    starts = np.unique(firsts[ordinary])
    following = np.searchsorted(ordinary, starts[1:], side="left")
    ends: IndexArray = np.append(ordinary[following - 1] + 1, ordinary[-1] + 1)  # behind the last token of each word
    kinds, places, numbers = draws.T
    anchors = ordinary[(places * len(ordinary)).astype(np.int64)]
    lengths: IndexArray = 1 + np.digitize(kinds, np.cumsum(SPAN_LENGTHS)[:-1])
    words: IndexArray = np.digitize(anchors, starts) - 1
    for length, word, number in zip(lengths.tolist(), words.tolist(), numbers.tolist(), strict=True):
        if budget <= 0:
            return
        if chosen[starts[word]]:
            continue
        for each in range(word, min(word + length, len(starts))):
            if budget <= 0 or (each > word and starts[each] != ends[each - 1]):
                break
            if not chosen[starts[each]]:
                chosen[starts[each] : ends[each]] = True
                share[starts[each] : ends[each]] = number
                budget -= int(ends[each] - starts[each])
