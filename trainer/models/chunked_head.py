"""The output head of a language model without logits: it computes the losses of tokens in blocks of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trainer.base.errors import UsageError
from trainer.models.families.table import FAMILIES
from trainer.parallel.communication import in_product_type
from trainer.parallel.pipeline.stand_ins import Absent
from trainer.parallel.tensor.cross_entropy import VocabularyCut
from trainer.parallel.tensor.linear import ColumnParallelLinear
from trainer.parallel.tensor.linear_cross_entropy import LinearLayer, linear_cross_entropy
from trainer.parallel.tensor.low_rank import product_of
from trainer.parallel.tensor.trained_rows import rows_of

Columns = int | Literal["auto"]
TokenScores = Callable[[Tensor, Tensor], Tensor]

_LEAST_COLUMNS = 4096
_LOGITS = 2**24  # 64 MiB in fp32
_LOGITS_OF_TRAINED = 2**28  # 1 GiB in fp32


class ChunkedHead:
    """Makes a head return the scores of labelled tokens instead of their logits, inside the context `use`.

    The head module stays in its place and is called as usual, so hooks and shards of its weight keep working.

    Args:
        head: the linear layer from hidden states to logits; its `forward` is replaced.
        columns: the maximum number of columns of a block; `auto`: see `_columns`.
        cut: how the vocabulary is sharded over tensor ranks; None: it is not.
        scores: computes scores `[..., 2]` from logits `[..., vocabulary]` and labels `[...]`, if there is one block.
    """

    def __init__(self, head: nn.Module, columns: Columns, cut: VocabularyCut | None, scores: TokenScores) -> None:
        self._head: Any = head
        self._logits = head.forward
        self._chosen = columns
        self._cut = cut
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

    def _run(self, hidden: Tensor) -> Tensor:
        """Return the logits for hidden states `[batch, sequence, hidden]`, or the scores `[batch, sequence, 2]`.

        The scores of a token are its loss and, without gradients, 1 if its prediction is right, else 0.
        """
        labels, weight = self._labels, self._head.weight
        if labels is None:
            logits: Tensor = self._logits(hidden)
            return logits
        columns = self._columns(labels.numel(), len(weight), torch.is_grad_enabled() and weight.requires_grad)
        if columns >= len(weight):
            return self._scores(self._logits(hidden), labels)
        head = self._head
        x = head.received(hidden) if isinstance(head, ColumnParallelLinear) else hidden
        found = linear_cross_entropy(
            in_product_type(x).flatten(0, -2),
            LinearLayer(weight, head.bias),
            labels.flatten(),
            self._cut or VocabularyCut(None, len(weight)),
            columns,
            finds_best=not torch.is_grad_enabled(),
        )
        return torch.stack(found, -1).view(*labels.shape, -1)

    def _columns(self, num_tokens: int, num_columns: int, is_trained: bool) -> int:
        """Return the maximum number of columns of a block.

        `auto` has at least 64 MiB of logits in a block, and blocks wide enough for fast products. The weight's gradient
        needs the logits a second time, so a trained weight has one block for logits below 1 GiB.
        """
        if self._chosen != "auto":
            return self._chosen
        if is_trained and num_tokens * num_columns < _LOGITS_OF_TRAINED:
            return num_columns
        return max(_LEAST_COLUMNS, _LOGITS // num_tokens)


def chunk_head(model: Any, columns: Columns, cut: VocabularyCut | None, scores: TokenScores) -> ChunkedHead | None:
    """Compute the losses of a language model in its head; return None for a pipeline stage without the head."""
    head = model.get_output_embeddings()
    return None if isinstance(head, Absent) else ChunkedHead(head, columns, cut, scores)


def why_whole(model: Any) -> str | None:
    """Return why the head of a model must return the logits of the whole vocabulary; None if it need not."""
    kind = model.config.model_type
    if kind not in FAMILIES or isinstance(getattr(model, "final_logits_bias", None), Tensor):
        return f"a model of type {kind} may change the logits after its head"
    head = model.get_output_embeddings()
    if isinstance(head, Absent):
        return None
    if product_of(head) is not None or rows_of(head) is not None or head._forward_hooks:
        return "an adapter changes the logits of its head"
    if type(head) not in (nn.Linear, ColumnParallelLinear):
        return f"its head is no linear layer, but a {type(head).__name__}"
    return None


def refuse_blocks(why: str) -> UsageError:
    """Return the error of a recipe whose blocks of the vocabulary the model cannot have."""
    return UsageError(
        f'`task.vocabulary_chunk` is a number, but the model needs its logits: {why}; set it to "auto" or null'
    )
