"""The output head of a model, in chunks of tokens: the logits of all tokens are never in memory at once.

Each chunk is recomputed in the backward pass, as in gradient checkpointing (Chen et al. 2016, arXiv:1604.06174).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer.base.errors import UsageError
from trainer.models.families.table import FAMILIES
from trainer.parallel.pipeline.stand_ins import Absent

TokenScores = Callable[[Tensor, Tensor], Tensor]


class ChunkedHead:
    """Makes a head return the scores of labelled tokens instead of their logits, inside the context `use`.

    The head module stays in its place and is called as usual, so hooks and shards of its weight keep working.

    Args:
        head: the module from hidden states to logits; its `forward` is replaced.
        num_tokens: the maximum number of tokens of a chunk.
        scores: computes scores `[tokens, n]` from logits `[tokens, vocabulary]` and labels `[tokens]`.
    """

    def __init__(self, head: nn.Module, num_tokens: int, scores: TokenScores) -> None:
        self._logits = head.forward
        self._num_tokens = num_tokens
        self._scores = scores
        self._labels: Tensor | None = None
        head.forward = self._run

    @contextmanager
    def use(self, labels: Tensor) -> Iterator[None]:
        """Score the tokens of a microbatch with `labels` `[batch, sequence]` inside of this context."""
        self._labels = labels
        try:
            yield
        finally:
            self._labels = None

    def _run(self, hidden: Tensor) -> Any:
        """Return the scores `[batch, sequence, n]` for hidden states `[batch, sequence, hidden]`, or their logits."""
        labels = self._labels
        if labels is None:
            return self._logits(hidden)
        tokens = hidden.flatten(0, 1), labels.flatten()
        parts = zip(*(torch.split(of_all, self._num_tokens) for of_all in tokens), strict=True)
        scores = torch.cat(
            [checkpoint(self._chunk, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
        )
        return scores.view(*labels.shape, -1)

    def _chunk(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return self._scores(self._logits(hidden), labels)


def chunk_head(model: Any, num_tokens: int, scores: TokenScores) -> ChunkedHead | None:
    """Chunk the output head of a causal language model; return None for a pipeline stage without the head.

    Raises:
        UsageError: the model is in no family of the table, so it may change its logits after the head.
    """
    if model.config.model_type not in FAMILIES:
        raise UsageError(
            "`task.loss_chunk_tokens` applies to families of the table, which do not change the logits after the head,"
            f" but the model is of type {model.config.model_type}; set it to null"
        )
    head = model.get_output_embeddings()
    return None if isinstance(head, Absent) else ChunkedHead(head, num_tokens, scores)
