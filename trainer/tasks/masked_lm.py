"""Masked language modelling on texts or pairs of texts, as in the pretraining of BERT."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainer.parallel.cross_entropy import VocabularyCut
from trainer.tasks.columns import require_text, tokenise
from trainer.tasks.masking import Masking
from trainer.tasks.token_labels import TokenLabels
from trainer.tasks.types import Dataset, Tokenizer


@dataclass(frozen=True)
class MaskedLMTask(TokenLabels):
    """Masked language modelling with cross entropy over the vocabulary.

    `vocabulary` describes how the logits are sharded over tensor ranks; None if they are not sharded.
    """

    text_columns: tuple[str, ...]
    mask_probability: float
    metric_names: tuple[str, ...]
    vocabulary: VocabularyCut | None = None

    auto_class_name = "AutoModelForMaskedLM"

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
