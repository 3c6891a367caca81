"""Masked language modelling on texts or pairs of texts, as in the pretraining of BERT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from torch import Tensor

from trainer.base.errors import DataError
from trainer.features.masked_lm.masking import Masking
from trainer.parallel.microbatch import IGNORED_LABEL
from trainer.parallel.tensor.cross_entropy import vocab_parallel_argmax
from trainer.tasks.exported import Card
from trainer.tasks.preview import Inputs, RowPreview, ShownToken
from trainer.tasks.text.columns import cell, require_columns, require_text, tokenise
from trainer.tasks.text.token_ids import MASK, columns_of_ids, holds_ids, read_ids
from trainer.tasks.token_labels import TokenLabels
from trainer.tasks.types import Dataset, Encoded, EvaluatedSplit, Tokenizer


class _MaskedTokens(RowPreview):
    def labelled(self, ids: Sequence[int], labels: Sequence[Any], inputs: Inputs) -> Sequence[ShownToken]:
        return [
            ShownToken(token) if label == IGNORED_LABEL else ShownToken(int(label), "masked")
            for token, label in zip(ids, labels, strict=True)
        ]


@dataclass(frozen=True)
class MaskedLMTask(TokenLabels):
    """Masked language modelling with cross entropy over the vocabulary.

    `is_answering`: mask tokens have a label of 0, which no code compares, and the scores of tokens are their answers.
    `beside`: the columns of masks beside a column of token ids, known after `resolve`. `num_tokens`: the size of the
    vocabulary; None: unknown.
    """

    text_columns: tuple[str, ...]
    mask_probability: float
    mask_probability_end: float | None
    mask_decay: str
    mask_units: str
    mask_shares: Sequence[float]
    metric_names: tuple[str, ...]
    is_answering: bool = False
    beside: tuple[str, ...] = ()
    num_tokens: int | None = None

    auto_class_name = "AutoModelForMaskedLM"
    card = Card("fill-mask")
    unencoded_fields = (
        "mask_probability", "mask_probability_end", "mask_decay", "mask_units", "mask_shares",
        "metric_names", "vocabulary", "takes_token_scores", "num_tokens",
    )  # fmt: skip

    @property
    def preview(self) -> RowPreview:
        return _MaskedTokens()

    @property
    def labelled_share(self) -> float:
        return self.mask_probability

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.text_columns, *self.beside)

    def resolve(self, train: Dataset, where: str) -> MaskedLMTask:
        self.check_columns(train.features, where)
        return replace(self, beside=columns_of_ids(train.features, MASK) if self._has_ids(train.features) else ())

    def conversion_notes(self, features: Mapping[str, Any]) -> list[str]:
        if not self._has_ids(features):
            return []
        unread = "; column `labels` is not read, since each epoch draws new masks" if "labels" in features else ""
        return [f"column `{self.text_columns[0]}` holds token ids, which are read{unread}"]

    def for_configuration(self, config: Any) -> MaskedLMTask:
        return replace(self, num_tokens=getattr(config, "vocab_size", None))

    def _has_ids(self, features: Mapping[str, Any]) -> bool:
        return len(self.text_columns) == 1 and holds_ids(features[self.text_columns[0]])

    def check_columns(self, features: Mapping[str, Any], where: str) -> None:
        require_columns(features, self.text_columns, "task.text", where)
        if not self._has_ids(features):
            require_text(features, self.text_columns, where)
        require_columns(features, self.beside, "task.text", where)

    def encode(self, rows: Dataset, tokenizer: Tokenizer, max_length: int, where: str, first_row: int) -> Encoded:
        if self._has_ids(rows.features):
            encoded = read_ids(rows, self.text_columns[0], self.beside, self.num_tokens, where, first_row)
            if empty := [row for row, (ids, _) in enumerate(encoded) if not ids]:
                raise DataError(
                    f"{cell(self.text_columns[0], first_row + empty[0], where)} has no token; leave the row out"
                )
            features: Encoded = {
                # No label here: masks are drawn again for each epoch, when rows become microbatches.
                "input_ids": [ids[:max_length] for ids, _ in encoded],
                "cut": [len(ids) > max_length for ids, _ in encoded],
            }
        else:
            features = tokenise(rows, self.text_columns, tokenizer, max_length, where, first_row)
        if self.is_answering:
            mask = tokenizer.mask_token_id
            features["labels"] = [
                [0 if token == mask else IGNORED_LABEL for token in ids] for ids in features["input_ids"]
            ]
        return features

    def masking(self, tokenizer: Tokenizer, seed: int) -> Masking:
        return replace(
            Masking.of(tokenizer, self.mask_probability, seed, self.mask_units),
            shares=self.mask_shares,
            last=self.mask_probability_end,
            is_cosine=self.mask_decay == "cosine",
        )

    def without_labels(self) -> MaskedLMTask:
        return replace(self, metric_names=(), is_answering=True)

    @property
    def head_blocks(self) -> Literal["vocabulary", "tokens"]:
        return "tokens" if self.is_answering else "vocabulary"

    def token_scores(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self._best(logits).unsqueeze(-1) if self.is_answering else super().token_scores(logits, labels)

    def answers(self, logits: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"tokens": logits[..., 0] if self.takes_token_scores else self._best(logits)}

    def _best(self, logits: Tensor) -> Tensor:
        cut = self._cut(logits)
        # Each tensor rank has a part of the vocabulary, so the largest logit is found over all of them.
        return vocab_parallel_argmax(logits, cut.group, cut.size)

    def readable(self, answers: Mapping[str, Tensor], split: EvaluatedSplit) -> list[dict[str, Any]]:
        """Return the predicted tokens of the mask tokens of each text, and the text with them."""
        tokenizer, encoded = split.tokenizer, split.encoded
        assert tokenizer is not None, "the rows are texts"
        texts = []
        for row, predicted in enumerate(answers["tokens"].numpy()):
            ids = encoded.tokens["input_ids"][encoded.offsets[row] : encoded.offsets[row + 1]]
            hidden = ids == tokenizer.mask_token_id
            filled = np.where(hidden, predicted[: len(ids)], ids).tolist()
            tokens = tokenizer.convert_ids_to_tokens(predicted[: len(ids)][hidden].tolist())
            texts.append({"tokens": tokens, "filled": tokenizer.decode(filled, skip_special_tokens=True)})
        return texts
