"""The output head of a language model without logits: it computes the losses of labelled tokens, in blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from trainer.base.errors import UsageError
from trainer.features.chunked_head.linear_cross_entropy import LinearLayer, linear_cross_entropy
from trainer.models.families.table import FAMILIES
from trainer.models.place import PlacedModel
from trainer.parallel.communication import in_product_type
from trainer.parallel.microbatch import IGNORED_LABEL
from trainer.parallel.pipeline.stand_ins import Absent
from trainer.parallel.tensor.cross_entropy import VocabularyCut
from trainer.parallel.tensor.linear import ColumnParallelLinear
from trainer.parallel.tensor.low_rank import product_of
from trainer.parallel.tensor.trained_rows import rows_of
from trainer.recipe.plan import RunPlan
from trainer.recipe.registered import asked_for
from trainer.tasks.task import Task

Columns = int | Literal["auto", "tokens"]
TokenScores = Callable[[Tensor, Tensor], Tensor]

_LEAST_COLUMNS = 4096
_LOGITS = 2**24  # 64 MiB in fp32
_LOGITS_OF_TRAINED = 2**28  # 1 GiB in fp32
_TOKENS = 64  # numbers of labelled tokens are rounded up, so that shapes recur


class ChunkedHead:
    """Makes a head return the scores of labelled tokens instead of their logits, inside the context `use`.

    The head module stays in its place and is called as usual, so hooks and shards of its weight keep working.

    Args:
        head: the linear layer from hidden states to logits; its `forward` is replaced.
        columns: the maximum number of columns of a block; `auto`: see `_columns`; `tokens`: blocks of tokens, each with
            the scores of all columns.
        cut: how the vocabulary is sharded over tensor ranks; None: it is not.
        scores: computes the scores of tokens from logits `[..., vocabulary]` and labels `[...]`, if there is one block.
    """

    def __init__(self, head: nn.Module, columns: Columns, cut: VocabularyCut | None, scores: TokenScores) -> None:
        self._head: Any = head
        self._chosen = columns
        self._cut = cut
        self._scores = scores
        self._labels: Tensor | None = None
        self._num_labels: int | None = None
        # Of the object: the module, its weight and its hooks stay.
        head.forward = self._run

    @contextmanager
    def use(self, labels: Tensor, num_labels: int | None = None) -> Iterator[None]:
        """Score the tokens of a microbatch inside of this context.

        Args:
            labels: the labels `[batch, sequence]`.
            num_labels: the number of labels that are not ignored, if the host knows it; other tokens then need no
                logits.
        """
        self._labels, self._num_labels = labels, num_labels
        try:
            yield
        finally:
            self._labels = self._num_labels = None

    def _logits(self, hidden: Tensor) -> Tensor:
        # By the class, because the object's `forward` is `_run`.
        logits: Tensor = type(self._head).forward(self._head, hidden)
        return logits

    def _run(self, hidden: Tensor) -> Tensor:
        """Return the logits for hidden states `[batch, sequence, hidden]`, or the scores `[batch, sequence, 1 or 2]`.

        The scores of a token are its loss and, without gradients, 1 if its prediction is right, else 0.
        """
        # Outside of `use`, such as in generation, the head is an ordinary one.
        if self._labels is None:
            return self._logits(hidden)
        tokens, labels = hidden.flatten(0, -2), self._labels.flatten()
        # The host must know the number: a read of it from the device would make it wait.
        size = len(labels) if self._num_labels is None else max(1, -(-self._num_labels // _TOKENS)) * _TOKENS
        if size >= len(labels):
            scores = self._scores_of(tokens, labels)
        else:
            # A sort has an output of known size, unlike `nonzero`, for which the host would wait.
            labelled = torch.argsort(labels == IGNORED_LABEL, stable=True)[:size]  # those with labels come first
            own = self._scores_of(tokens.index_select(0, labelled), labels.index_select(0, labelled))
            # Tokens without labels have a loss of 0.
            scores = own.new_zeros(len(labels), own.shape[-1]).index_copy(0, labelled, own)
        return scores.view(*self._labels.shape, -1)

    def _scores_of(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the scores `[tokens, 1 or 2]` for hidden states `[tokens, hidden]` and labels `[tokens]`."""
        head, weight = self._head, self._head.weight
        if self._chosen == "tokens":
            # The number of tokens with 64 MiB of logits.
            step = max(1, _LOGITS // len(weight))
            blocks = [
                (tokens[first : first + step], labels[first : first + step]) for first in range(0, len(labels), step)
            ]
            return torch.cat([self._scores(self._logits(own), of) for own, of in blocks])
        columns = self._columns(
            self._chosen, len(labels), len(weight), torch.is_grad_enabled() and weight.requires_grad
        )
        if columns >= len(weight):
            return self._scores(self._logits(tokens), labels)
        # The communication of a column-parallel layer, which `_logits` would do inside of its forward.
        received = head.received(tokens) if isinstance(head, ColumnParallelLinear) else tokens
        losses, right = linear_cross_entropy(
            in_product_type(received),
            LinearLayer(weight, head.bias),
            labels,
            self._cut or VocabularyCut(None, len(weight)),
            columns,
            finds_best=not torch.is_grad_enabled(),
        )
        return losses.unsqueeze(-1) if torch.is_grad_enabled() else torch.stack([losses, right], -1)

    def _columns(self, chosen: int | Literal["auto"], num_tokens: int, num_columns: int, is_trained: bool) -> int:
        """Return the maximum number of columns of a block.

        `auto` has at least 64 MiB of logits in a block, and blocks wide enough for fast products. The weight's gradient
        needs the logits a second time, so a trained weight has one block for logits below 1 GiB.
        """
        if chosen != "auto":
            return chosen
        if is_trained and num_tokens * num_columns < _LOGITS_OF_TRAINED:
            return num_columns
        return max(_LEAST_COLUMNS, _LOGITS // num_tokens)


class ChunkedHeads:
    """The heads of a recipe's models; `columns` is that of `ChunkedHead`."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns

    @classmethod
    def of(cls, built: Sequence[PlacedModel], task: Task, plan: RunPlan) -> Self | None:
        """Return the heads; None without blocks, or if `auto` finds a part of the training that needs all logits.

        Raises:
            UsageError: a model needs its logits, but `task.vocabulary_chunk` is a number.
        """
        # A registered task may derive its section from another base.
        chosen = getattr(plan.recipe.task, "vocabulary_chunk", None)
        columns: Columns | None = "tokens" if task.head_blocks == "tokens" else chosen
        if columns is None:
            return None
        needs_all = plan.strategy.single_process or asked_for("second_model", plan.recipe)
        # A text lets the trainer choose. `dp` copies modules, but the `forward` of a copied head would call the first.
        if isinstance(columns, str) and needs_all:
            return None
        why = next((why for part in built if (why := why_whole(part.model))), None)
        # A number is the user's wish, which is refused and never dropped in silence; a text allows whole logits.
        if why is not None and not isinstance(columns, str):
            raise UsageError(
                f'`task.vocabulary_chunk` is a number, but the model needs its logits: {why}; set it to "auto" or null'
            )
        return cls(columns) if why is None else None

    def attach(self, model: Any, cut: VocabularyCut | None, task: Task) -> ChunkedHead | None:
        """Compute the losses of a language model in its head; return None for a pipeline stage without the head."""
        head = model.get_output_embeddings()
        return None if isinstance(head, Absent) else ChunkedHead(head, self._columns, cut, task.token_scores)


def why_whole(model: Any) -> str | None:
    """Return why the head of a model must return the logits of the whole vocabulary; None if it need not."""
    kind = model.config.model_type
    # Only of families in the table is it known that nothing happens to the logits after the head.
    if kind not in FAMILIES or isinstance(getattr(model, "final_logits_bias", None), Tensor):
        return f"a model of type {kind} may change the logits after its head"
    head = model.get_output_embeddings()
    if isinstance(head, Absent):
        return None
    # The blocks multiply by the head's weight directly, so nothing may change its output.
    if product_of(head) is not None or rows_of(head) is not None or head._forward_hooks:
        return "an adapter changes the logits of its head"
    if type(head) not in (nn.Linear, ColumnParallelLinear):
        return f"its head is no linear layer, but a {type(head).__name__}"
    return None
