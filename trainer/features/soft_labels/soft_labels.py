"""Sequence classification with a probability of each class, such as those of a language model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.base.errors import DataError
from trainer.recipe.schema import TaskKeys
from trainer.tasks.sequence_classification import SequenceClassificationTask
from trainer.tasks.task import Task
from trainer.tasks.text.columns import cell, dtype_in_list, finite_number, require_kind, shown, tokenise
from trainer.tasks.types import Dataset, Encoded, EvaluatedSplit, Tokenizer

_NUMBERS = ("float", "int")
_MOST_APART = 1e-3  # of the sum from 1, because files hold rounded numbers


@dataclass(frozen=True)
class SoftLabelsTask(SequenceClassificationTask):
    """Classification of texts or pairs of texts by cross entropy with probabilities.

    The loss is that of `torch.nn.CrossEntropyLoss` with probabilities. Its gradient is that of the divergence.
    """

    @classmethod
    def of(cls, section: TaskKeys, **given: Any) -> Task:
        return super().of(section, label_column=vars(section)["probabilities"], **given)

    def resolve(self, train: Dataset, where: str) -> SoftLabelsTask:
        self.check_columns(train.features, where)
        return self.with_classes(self._known_class_names, False)

    def _check_label(self, features: Mapping[str, Any], where: str) -> None:
        if self.labelled:
            needed = "a column of lists of probabilities, or of objects with the probability of each class"
            require_kind(features, self.label_column, "task.probabilities", where, _holds_numbers, needed)
            feature, names = features[self.label_column], self._known_class_names
            if isinstance(feature, Mapping) and {*feature} != {*names}:
                raise DataError(
                    f"`task.labels` must name the classes of column `{self.label_column}` of {where},"
                    f" {shown([*feature])}, but names {shown(names)}; correct it"
                )

    def conversion_notes(self, features: Mapping[str, Any]) -> list[str]:
        return []

    def encode(self, rows: Dataset, tokenizer: Tokenizer, max_length: int, where: str, first_row: int) -> Encoded:
        features = tokenise(rows, self.text_columns, tokenizer, max_length, where, first_row)
        return features if not self.labelled else {**features, "labels": self._probabilities(rows, where, first_row)}

    def _probabilities(self, rows: Dataset, where: str, first_row: int) -> list[NDArray[np.float32]]:
        """Return the probabilities of each row `[num_labels]`."""
        number, found = len(self._known_class_names), []
        for row, values in enumerate(rows[self.label_column]):
            at = cell(self.label_column, first_row + row, where)
            if isinstance(values, Mapping):  # as `trainer predict` writes them
                values = [values[name] for name in self._known_class_names]
            if values is None or len(values) != number:
                problem = "is null" if values is None else f"has {len(values)}"
                raise DataError(f"{at} must have a probability for each of the {number} `task.labels`, but {problem}")
            numbers = [finite_number(value) for value in values]
            if any(value is None or value < 0 for value in numbers):
                raise DataError(f"{at} must hold numbers from 0 to 1, but holds {values}; correct it")
            array = np.array(numbers, np.float32)
            if abs(float(array.sum()) - 1) > _MOST_APART:
                raise DataError(f"{at} must hold probabilities with the sum 1, but their sum is {array.sum():.6g}")
            found.append(array)
        return found

    def num_valid(self, labels: Tensor) -> Tensor:
        return torch.tensor(len(labels), device=labels.device)

    def label_weights(self, labels: Tensor) -> Tensor:
        return labels.new_ones(len(labels))

    def loss_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the cross entropy of logits and probabilities `[batch, num_labels]`, summed over rows."""
        return super().loss_sum(logits, labels.to(torch.promote_types(logits.dtype, torch.float32)))

    def predictions(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return super().predictions(logits, labels.argmax(-1))

    def split_baselines(self, split: EvaluatedSplit) -> dict[str, float]:
        labels = torch.from_numpy(np.asarray(split.encoded.arrays["labels"]).argmax(-1))
        found = super().baselines(labels, None)
        return {name: found[name] for name in self.metric_names if name in found}

    def empty_batch(self, shape: tuple[int, ...]) -> tuple[dict[str, Tensor], Tensor]:
        return {}, torch.zeros(shape[0], len(self._known_class_names))


def _holds_numbers(feature: Any) -> bool:
    if isinstance(feature, Mapping):
        return all(str(getattr(of_class, "dtype", "")).startswith(_NUMBERS) for of_class in feature.values())
    return str(dtype_in_list(feature)).startswith(_NUMBERS)
