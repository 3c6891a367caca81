"""The base of tasks that predict tokens of the vocabulary: loss and metrics over the labelled tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from trainer.parallel.microbatch import IGNORED_LABEL
from trainer.parallel.tensor.cross_entropy import (
    VocabularyCut,
    vocab_parallel_argmax,
    vocab_parallel_cross_entropy,
)
from trainer.tasks.metrics.table import METRICS
from trainer.tasks.task import TextTask

if TYPE_CHECKING:
    from typing_extensions import Self

TOKEN_METRICS = {"accuracy": ("token_accuracy", "num_right"), "perplexity": ("perplexity", "losses")}
"""The row in the table of metrics and the input in the predictions, by the metric's name in a recipe."""


class TokenLabels(TextTask):
    """Base class of tasks with one label for each token, or `IGNORED_LABEL`.

    Subclasses are frozen dataclasses with these fields and with fields for their inputs.

    Attributes:
        metric_names: the metrics to compute, the deciding one first.
        vocabulary: how the logits are sharded over tensor ranks; None if they are not sharded.
    """

    metric_names: tuple[str, ...]
    vocabulary: VocabularyCut | None

    rows_are_labels = False
    labels_are_tokens = True

    def for_vocabulary(self, cut: VocabularyCut | None) -> Self:
        task: Any = self
        of_shard: Self = replace(task, vocabulary=cut)
        return of_shard

    def num_valid(self, labels: Tensor) -> Tensor:
        return (labels != IGNORED_LABEL).sum()

    def loss_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the cross entropy, summed over the labelled tokens; 0 if there are none.

        Args:
            logits: the logits, of shape `[batch, sequence, vocabulary]`, or this rank's shard of the vocabulary.
            labels: the labels, of shape `[batch, sequence]`.
        """
        return self._cross_entropy(logits, labels, "sum")

    def predictions(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return sums over the labelled tokens of each row: rows differ in length, and a split may have many tokens."""
        cut = self._cut(logits)
        right = vocab_parallel_argmax(logits, cut.group, cut.size) == labels  # no token id equals the ignored label
        found = {"num_right": right.sum(-1), "num_labels": (labels != IGNORED_LABEL).sum(-1)}
        if "perplexity" in self.metric_names:
            found["losses"] = self._cross_entropy(logits, labels, "none").double().sum(-1)
        return found

    def metrics(self, predictions: Mapping[str, Tensor]) -> dict[str, float]:
        return {name: self.token_metric(name, predictions) for name in self.metric_names}

    def token_metric(self, name: str, predictions: Mapping[str, Tensor]) -> float:
        """Return a metric of `TOKEN_METRICS`."""
        metric, of_rows = TOKEN_METRICS[name]
        return METRICS[metric].compute(predictions[of_rows].numpy(), predictions["num_labels"].numpy())

    def _cut(self, logits: Tensor) -> VocabularyCut:
        return self.vocabulary or VocabularyCut(None, logits.shape[-1])

    def _cross_entropy(self, logits: Tensor, labels: Tensor, reduction: Literal["none", "sum"]) -> Tensor:
        cut = self._cut(logits)
        return vocab_parallel_cross_entropy(logits, labels, cut.group, cut.size, reduction=reduction)
