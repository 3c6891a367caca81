"""Sequence classification with any number of labels for each row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from trainer.base.errors import DataError, UsageError
from trainer.parallel.dtypes import at_least_fp32
from trainer.tasks.classes import NamedClasses, holds_names
from trainer.tasks.task import TextTask
from trainer.tasks.text.columns import cell, require_kind, require_text, shown, tokenise
from trainer.tasks.types import Dataset, Encoded, EvaluatedSplit, Tokenizer


@dataclass(frozen=True)
class MultiLabelTask(NamedClasses, TextTask):
    """Classification of texts or pairs of texts; each label of a row holds or not.

    `labels_are_names` is false for lists of 0 and 1. `threshold` is the probability above which a label is predicted;
    a mapping holds those of labels by name, and other labels have 0.5.
    """

    text_columns: tuple[str, ...]
    label_column: str
    metric_names: tuple[str, ...]
    threshold: float | Mapping[str, float] = 0.5

    auto_class_name = "AutoModelForSequenceClassification"
    unencoded_fields = ("metric_names", "threshold")

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.text_columns, self.label_column) if self.labelled else self.text_columns

    def model_options(self) -> dict[str, Any]:
        return {**super().model_options(), "problem_type": "multi_label_classification"}

    def resolve(self, train: Dataset, where: str) -> MultiLabelTask:
        self.check_columns(train.features, where)
        feature = train.features[self.label_column].feature
        are_names = bool(holds_names(feature))
        if not are_names and self.class_names is None:
            raise UsageError(
                f"`task.labels` must name the labels in order, because column `{self.label_column}` of {where} holds"
                " lists of 0 and 1; add it"
            )
        found = set(chain.from_iterable(labels or () for labels in train[self.label_column]))
        names = self.class_names or self.find_names(feature, found, where)
        if isinstance(self.threshold, Mapping) and (unknown := [name for name in self.threshold if name not in names]):
            raise UsageError(
                f"`task.threshold` must name labels, but names {unknown[0]!r}; the labels are {shown(names)}"
            )
        return self.with_classes(names, are_names)

    def check_columns(self, features: Mapping[str, Any], where: str) -> None:
        require_text(features, self.text_columns, where)
        if not self.labelled:
            return
        needed = "a column of lists of names, or of 0 and 1, because `task.multi_label` is true"
        require_kind(
            features, self.label_column, "task.label", where, lambda one: _holds_names(one) is not None, needed
        )
        are_names = bool(_holds_names(features[self.label_column]))
        self.require_same_kind(are_names, "lists of names", "lists of 0 and 1", where)

    def encode(self, rows: Dataset, tokenizer: Tokenizer, max_length: int, where: str, first_row: int) -> Encoded:
        features = tokenise(rows, self.text_columns, tokenizer, max_length, where, first_row)
        return features if not self.labelled else {**features, "labels": self._labels(rows, where, first_row)}

    def loss_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the binary cross entropy of logits `[batch, num_labels]`, averaged over labels, summed over rows."""
        scores = at_least_fp32(logits)
        total = F.binary_cross_entropy_with_logits(scores, labels.to(scores.dtype), reduction="sum")
        # The number of labels is the same in all rows, so a row counts as one valid label of the batch.
        return total / scores.shape[-1]

    def predictions(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        predicted = at_least_fp32(logits).sigmoid() > self._thresholds.to(logits.device)
        found = {"predictions": predicted.long(), "labels": labels.long()}
        return self._with_probabilities(found, lambda: logits.double().sigmoid())

    def split_baselines(self, split: EvaluatedSplit) -> dict[str, float]:
        labels = np.asarray(split.encoded.arrays["labels"], np.int64)
        # The best constant answer is the most frequent set of labels.
        sets, counts = np.unique(labels, axis=0, return_counts=True)
        constant = np.broadcast_to(sets[counts.argmax()], labels.shape).copy()
        given = {"predictions": torch.from_numpy(constant), "labels": torch.from_numpy(labels)}
        shares = torch.from_numpy(labels.mean(0)).expand(labels.shape)
        metrics = self.metrics(self._with_probabilities(given, lambda: shares))
        return {name: metrics[name] for name in self.metric_names if name in metrics}

    def picture(self, predictions: Mapping[str, Tensor], split: EvaluatedSplit | None) -> dict[str, Any] | None:
        return self.pictures(predictions) or None

    def answers(self, logits: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"probabilities": at_least_fp32(logits).sigmoid()}

    def readable(self, answers: Mapping[str, Tensor], split: EvaluatedSplit) -> list[dict[str, Any]]:
        """Return the labels above the threshold and the probability of each label, for each row."""
        names, probabilities = self._known_class_names, answers["probabilities"]
        return [
            {
                "prediction": [name for name, holds in zip(names, held, strict=True) if holds],
                "probabilities": self.named_probabilities(row),
            }
            for row, held in zip(probabilities.tolist(), (probabilities > self._thresholds).tolist(), strict=True)
        ]

    @property
    def _thresholds(self) -> Tensor:
        """The threshold of each label, of shape `[num_labels]`."""
        given, names = self.threshold, self._known_class_names
        values = [given.get(name, 0.5) if isinstance(given, Mapping) else given for name in names]
        return torch.tensor(values, dtype=torch.float32)

    def _labels(self, rows: Dataset, where: str, first_row: int) -> list[NDArray[np.float32]]:
        """Return 0 or 1 for each label of each row, as arrays `[num_labels]`."""
        names = self._known_class_names
        index_of, declared = self.index_of(rows.features[self.label_column].feature)
        encoded = []
        for row, labels in enumerate(rows[self.label_column]):
            place = cell(self.label_column, first_row + row, where)
            if labels is None:
                raise DataError(f"{place} is null; a row without labels has an empty list")
            array: NDArray[np.float32] = np.zeros(len(names), np.float32)
            if self.labels_are_names:
                for label in labels:
                    if label not in index_of:
                        raise self.unknown(label, declared, f"{place}, in its list,")
                    array[index_of[label]] = 1
            elif labels:
                if len(labels) != len(names) or any(label not in (0, 1) for label in labels):
                    raise DataError(
                        f"{place} must be empty or have 0 or 1 for each of the {len(names)} labels of `task.labels`,"
                        f" but is {labels}"
                    )
                array[:] = labels
            encoded.append(array)
        return encoded

    def empty_batch(self, shape: tuple[int, ...]) -> tuple[dict[str, Tensor], Tensor]:
        return {}, torch.zeros(shape[0], self.model_options()["num_labels"])


def _holds_names(feature: Any) -> bool | None:
    """Return whether a column holds lists of names, or of numbers; None for other columns."""
    if type(feature).__name__ not in ("List", "LargeList"):
        return None
    inner = feature.feature
    return False if str(getattr(inner, "dtype", "")).startswith(("bool", "float")) else holds_names(inner)
