"""Sequence regression."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.parallel.dtypes import at_least_fp32
from trainer.tasks.exported import TEXT_CLASSIFICATION
from trainer.tasks.task import TextTask
from trainer.tasks.text.columns import finite_numbers, require_columns, require_text, tokenise
from trainer.tasks.text.tied_texts import first_of_equal
from trainer.tasks.types import Dataset, Encoded, EvaluatedSplit, Tokenizer


@dataclass(frozen=True)
class SequenceRegressionTask(TextTask):
    """Regression on texts or pairs of texts with the squared error; without a label column, for predictions."""

    text_columns: tuple[str, ...]
    label_column: str | None
    metric_names: tuple[str, ...]

    auto_class_name = "AutoModelForSequenceClassification"
    card = TEXT_CLASSIFICATION
    unencoded_fields = ("metric_names",)

    @property
    def columns(self) -> tuple[str, ...]:
        return self.text_columns if self.label_column is None else (*self.text_columns, self.label_column)

    def model_options(self) -> dict[str, Any]:
        return {"num_labels": 1, "problem_type": "regression"}

    def check_columns(self, features: Mapping[str, Any], where: str) -> None:
        require_text(features, self.text_columns, where)
        if self.label_column is not None:
            require_columns(features, [self.label_column], "task.label", where)

    def encode(self, rows: Dataset, tokenizer: Tokenizer, max_length: int, where: str, first_row: int) -> Encoded:
        features = tokenise(rows, self.text_columns, tokenizer, max_length, where, first_row)
        if self.label_column is None:
            return features
        return {**features, "labels": finite_numbers(rows, self.label_column, where, first_row)}

    def loss_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the squared error of outputs `[batch, 1]`, summed over the rows."""
        scores = at_least_fp32(logits).squeeze(-1)
        # A sum, because the engine divides by the rows of the global batch.
        return F.mse_loss(scores, labels.to(scores.dtype), reduction="sum")

    def predictions(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"predictions": logits.float().squeeze(-1), "labels": labels.float()}

    def baselines(self, labels: Tensor | None, vocabulary: int | None) -> dict[str, float]:
        return {} if labels is None else self._constant_metrics(labels.float(), float(labels.float().mean()))

    def split_metrics(self, predictions: Mapping[str, Tensor], split: EvaluatedSplit) -> dict[str, float]:
        first = torch.from_numpy(first_of_equal(split.encoded))  # equal texts are ties of a rank correlation
        return self.metrics({**predictions, "predictions": predictions["predictions"][first]})

    def without_labels(self) -> SequenceRegressionTask:
        return replace(self, label_column=None, metric_names=())

    def answers(self, logits: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"predictions": logits.float().squeeze(-1)}

    def readable(self, answers: Mapping[str, Tensor], split: EvaluatedSplit) -> list[dict[str, Any]]:
        # fp32 has about seven significant digits, and further ones would show its rounding only.
        return [{"prediction": float(f"{value:.6g}")} for value in answers["predictions"].tolist()]

    def empty_batch(self, shape: tuple[int, ...]) -> tuple[dict[str, Tensor], Tensor]:
        return {}, torch.zeros(shape[0])
