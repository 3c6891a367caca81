"""An output head that computes scores of tokens in place of logits."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor


class TokenHead(Protocol):
    """The output head of a language model that returns the scores of labelled tokens inside of `use`."""

    def use(self, labels: Tensor, num_labels: int | None = None) -> AbstractContextManager[None]:
        """Score the tokens of a microbatch inside of this context.

        Args:
            labels: the labels `[batch, sequence]`.
            num_labels: the number of labels that are not ignored, if the host knows it; other tokens then need no
                logits.
        """
