"""Masked language modelling on texts or pairs of texts, as in the pretraining of BERT."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from trainer.parallel.cross_entropy import VocabularyCut, vocab_parallel_argmax, vocab_parallel_cross_entropy
from trainer.parallel.microbatch import IGNORED_LABEL
from trainer.tasks.columns import require_text, tokenise
from trainer.tasks.masking import Masking
from trainer.tasks.metrics import METRICS
from trainer.tasks.task import TaskDefaults
from trainer.tasks.types import Dataset, Tokenizer

_METRICS = {"accuracy": ("token_accuracy", "num_right"), "perplexity": ("perplexity", "losses")}
"""The row in the table of metrics and the input in the predictions, by the metric's name in a recipe."""


@dataclass(frozen=True)
class MaskedLMTask(TaskDefaults):
    """Masked language modelling with cross entropy over the vocabulary.

    `vocabulary` describes how the logits are sharded over tensor ranks; None if they are not sharded.
    """

    text_columns: tuple[str, ...]
    mask_probability: float
    metric_names: tuple[str, ...]
    vocabulary: VocabularyCut | None = None

    auto_class_name = "AutoModelForMaskedLM"
    rows_are_labels = False

    @property
    def columns(self) -> tuple[str, ...]:
        return self.text_columns

    @property
    def fingerprint(self) -> str:
        return json.dumps(["masked_lm", self.text_columns])  # without the masking, which is applied to cached rows

    def resolve(self, train: Dataset, where: str) -> MaskedLMTask:
        self.check_columns(train.features, where)
        return self

    def check_columns(self, features: Mapping[str, Any], where: str) -> None:
        require_text(features, self.text_columns, where)

    def encode(
        self, rows: Dataset, tokenizer: Tokenizer, max_length: int, where: str, first_row: int
    ) -> dict[str, list[Any]]:
        return tokenise(rows, self.text_columns, tokenizer, max_length, where, first_row)

    def masking(self, tokenizer: Tokenizer, seed: int) -> Masking:
        return Masking.of(tokenizer, self.mask_probability, seed)

    def for_vocabulary(self, cut: VocabularyCut | None) -> MaskedLMTask:
        return replace(self, vocabulary=cut)

    def num_valid(self, labels: Tensor) -> Tensor:
        return (labels != IGNORED_LABEL).sum()

    def loss_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the cross entropy, summed over the masked tokens; 0 if there are none.

        Args:
            logits: the logits, of shape `[batch, sequence, vocabulary]`, or this rank's shard of the vocabulary.
            labels: the labels, of shape `[batch, sequence]`.
        """
        return self._cross_entropy(logits, labels, "sum")

    def predictions(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return sums over the masked tokens of each row: rows differ in length, and a split may have many tokens."""
        cut = self._cut(logits)
        right = vocab_parallel_argmax(logits, cut.group, cut.size) == labels  # no token id equals the ignored label
        found = {"num_right": right.sum(-1).cpu(), "num_hidden": (labels != IGNORED_LABEL).sum(-1).cpu()}
        if "perplexity" in self.metric_names:
            found["losses"] = self._cross_entropy(logits, labels, "none").double().sum(-1).cpu()
        return found

    def metrics(self, predictions: Mapping[str, Tensor]) -> dict[str, float]:
        sums = {name: tensor.numpy() for name, tensor in predictions.items()}
        computed = {}
        for name in self.metric_names:
            metric, of_rows = _METRICS[name]
            computed[name] = METRICS[metric].compute(sums[of_rows], sums["num_hidden"])
        return computed

    def _cut(self, logits: Tensor) -> VocabularyCut:
        return self.vocabulary or VocabularyCut(None, logits.shape[-1])

    def _cross_entropy(self, logits: Tensor, labels: Tensor, reduction: Literal["none", "sum"]) -> Tensor:
        cut = self._cut(logits)
        return vocab_parallel_cross_entropy(logits, labels, cut.group, cut.size, reduction=reduction)
