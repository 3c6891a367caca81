"""The base of tasks that predict tokens of the vocabulary: loss and metrics over the labelled tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

from trainer.parallel.microbatch import IGNORED_LABEL
from trainer.parallel.tensor.cross_entropy import VocabularyCut, vocab_parallel_argmax, vocab_parallel_cross_entropy
from trainer.tasks.metrics.table import METRICS
from trainer.tasks.preview import NextTokens, RowPreview
from trainer.tasks.task import TextTask

TOKEN_METRICS = {"accuracy": ("token_accuracy", "num_right"), "perplexity": ("perplexity", "losses")}
"""The row in the table of metrics and the input in the predictions, by the metric's name in a recipe."""


@dataclass(frozen=True, kw_only=True)
class TokenLabels(TextTask):
    """Base class of tasks with one label for each token, or `IGNORED_LABEL`.

    Attributes:
        vocabulary: how the logits are sharded over tensor ranks; None if they are not sharded.
        takes_token_scores: see `VocabularyLoss`; `logits` are then `token_scores`.
    """

    vocabulary: VocabularyCut | None = None
    takes_token_scores: bool = False

    rows_are_labels = False
    labels_are_tokens = True

    @property
    def preview(self) -> RowPreview:
        return NextTokens()

    def for_vocabulary(self, cut: VocabularyCut | None) -> Self:
        return self.changed(vocabulary=cut)

    @property
    def head_blocks(self) -> Literal["vocabulary", "tokens"] | None:
        return "vocabulary"

    def for_token_scores(self) -> Self:
        return self.changed(takes_token_scores=True)

    def num_valid(self, labels: Tensor) -> Tensor:
        return (labels != IGNORED_LABEL).sum()

    def loss_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the cross entropy of logits `[batch, sequence, vocabulary]`, summed over the labelled tokens."""
        # A slice of all scores is no operation.
        return logits[..., :1].sum() if self.takes_token_scores else self._cross_entropy(logits, labels, "sum")

    def token_scores(self, logits: Tensor, labels: Tensor) -> Tensor:
        losses = self._cross_entropy(logits, labels, "none")
        if torch.is_grad_enabled():
            return losses.unsqueeze(-1)
        return torch.stack([losses, self._right(logits, labels).to(losses.dtype)], -1)

    def predictions(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return sums over the labelled tokens of each row: rows differ in length, and a split may have many tokens."""
        num_labels = (labels != IGNORED_LABEL).sum(-1)
        if self.takes_token_scores:
            # fp64: the sums of rows are added again over the whole split.
            losses, num_right = logits.double().sum(1).unbind(-1)
            return {"num_right": num_right.long(), "num_labels": num_labels, "losses": losses}
        counts = {"num_right": self._right(logits, labels).sum(-1), "num_labels": num_labels}
        if "perplexity" in self.metric_names:
            # In fp64 before the sum, because the perplexity adds the losses of all tokens of a split.
            counts["losses"] = self._cross_entropy(logits, labels, "none").double().sum(-1)
        return counts

    def metrics(self, predictions: Mapping[str, Tensor]) -> dict[str, float]:
        return {name: self.token_metric(name, predictions) for name in self.metric_names}

    def baselines(self, labels: Tensor | None, vocabulary: int | None) -> dict[str, float]:
        return {} if vocabulary is None else {"loss": math.log(vocabulary), "perplexity": float(vocabulary)}

    def token_metric(self, name: str, predictions: Mapping[str, Tensor]) -> float:
        """Return a metric of `TOKEN_METRICS`."""
        metric, of_rows = TOKEN_METRICS[name]
        return float(METRICS[metric].compute(predictions[of_rows].numpy(), predictions["num_labels"].numpy()))

    def _right(self, logits: Tensor, labels: Tensor) -> Tensor:
        cut = self._cut(logits)
        return vocab_parallel_argmax(logits, cut.group, cut.size) == labels  # no token id equals the ignored label

    def _cut(self, logits: Tensor) -> VocabularyCut:
        return self.vocabulary or VocabularyCut(None, logits.shape[-1])

    def _cross_entropy(self, logits: Tensor, labels: Tensor, reduction: Literal["none", "sum"]) -> Tensor:
        cut = self._cut(logits)
        return vocab_parallel_cross_entropy(logits, labels, cut.group, cut.size, reduction=reduction)

    def empty_batch(self, shape: tuple[int, ...]) -> tuple[dict[str, Tensor], Tensor]:
        return {}, torch.zeros(shape, dtype=torch.long)
