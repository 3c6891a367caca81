"""Sequence classification."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.tasks.classes import RowClasses
from trainer.tasks.exported import TEXT_CLASSIFICATION
from trainer.tasks.task import TextTask
from trainer.tasks.text.columns import require_text, tokenise
from trainer.tasks.types import Dataset, Encoded, Tokenizer


@dataclass(frozen=True)
class SequenceClassificationTask(RowClasses, TextTask):
    """Classification of texts or pairs of texts."""

    text_columns: tuple[str, ...]
    label_column: str
    metric_names: tuple[str, ...]

    auto_class_name = "AutoModelForSequenceClassification"
    card = TEXT_CLASSIFICATION

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.text_columns, self.label_column) if self.labelled else self.text_columns

    def check_inputs(self, features: Mapping[str, Any], where: str) -> None:
        require_text(features, self.text_columns, where)

    def encode(self, rows: Dataset, tokenizer: Tokenizer, max_length: int, where: str, first_row: int) -> Encoded:
        features = tokenise(rows, self.text_columns, tokenizer, max_length, where, first_row)
        return features if not self.labelled else {**features, "labels": self.class_indices(rows, where, first_row)}
