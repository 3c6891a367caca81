"""The base of tasks with one class for each row: class names, class indices, loss and metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor

from trainer.base.errors import DataError, UsageError
from trainer.base.text import listed
from trainer.parallel.dtypes import at_least_fp32
from trainer.tasks.columns import STRING_TYPES, cell, require_columns, type_name
from trainer.tasks.metrics import METRICS
from trainer.tasks.task import TaskDefaults
from trainer.tasks.types import Dataset

if TYPE_CHECKING:
    from typing_extensions import Self

_NAMES_SHOWN = 10


class RowClasses(TaskDefaults):
    """Base class of tasks that give each row one class.

    Subclasses are frozen dataclasses with these fields and with fields for their inputs.

    Attributes:
        label_column: the column of labels.
        metric_names: the metrics to compute, the deciding one first.
        class_names: the name of class `i` at index `i`; None until `resolve` finds the names in the training split.
        labels_are_names: whether the training split holds class names, not indices. Other splits must do the same,
            because a wrong index cannot be detected.
    """

    label_column: str
    metric_names: tuple[str, ...]
    class_names: tuple[str, ...] | None
    labels_are_names: bool | None

    rows_are_labels = True

    def check_inputs(self, features: Mapping[str, Any], where: str) -> None:
        """Check all columns of a split except the label column.

        Raises:
            DataError: a column is missing or has the wrong type.
        """
        raise NotImplementedError

    def with_classes(self, names: tuple[str, ...], labels_are_names: bool | None) -> Self:
        """Return the task with these classes."""
        raise NotImplementedError

    def resolve(self, train: Dataset, where: str) -> Self:
        self.check_columns(train.features, where)
        names = self.class_names or self._find_class_names(train, where)
        if "f1" in self.metric_names and len(names) != 2:
            raise UsageError(
                f"`task.metrics` may name f1 only for two classes, but column `{self.label_column}` has {len(names)}:"
                f" {_shown(names)}; use f1_macro"
            )
        return self.with_classes(names, _holds_names(train.features[self.label_column]))

    def in_checkpoint_order(self, checkpoint: Sequence[str], chosen: bool) -> tuple[Self, list[str]]:
        """Return the task with its classes in the order of a fine-tuned checkpoint's head, and notes for the user.

        The comparison of names ignores case and outer spaces.

        Args:
            checkpoint: the class names of the checkpoint, in order.
            chosen: whether the recipe lists the classes in `task.labels`; their order then stays.

        Raises:
            UsageError: only some of the names match, and the recipe does not list the classes.
        """
        names = self._known_class_names
        if not self.labels_are_names:  # an index means the same in both
            return self, []
        own, theirs = _places(names), _places(checkpoint)
        common = own.keys() & theirs.keys()
        shown = f"the checkpoint's classes are {_shown(checkpoint)}"
        if not common:
            same_size = len(names) == len(checkpoint)
            return self, [f"{shown}: its head starts from these, to learn others"] if same_size else []
        if chosen:
            same = list(own) == list(theirs)
            return self, [] if same else [f"{shown}, in another order or number than `task.labels`"]
        if own.keys() != theirs.keys():
            raise UsageError(
                f"column `{self.label_column}` must hold the classes of the checkpoint, or none of them, but {shown}"
                f" and the training split has {_shown(names)}; list the classes in `task.labels`, in the order of the"
                " checkpoint"
            )
        ordered = tuple(names[own[key]] for key in theirs)
        if ordered == names:
            return self, []
        note = f"classes are in the order of the checkpoint: {_shown(ordered)}"
        return self.with_classes(ordered, self.labels_are_names), [note]

    def model_options(self) -> dict[str, Any]:
        names = self._known_class_names
        return {
            "num_labels": len(names),
            "id2label": dict(enumerate(names)),
            "label2id": {name: index for index, name in enumerate(names)},
            "problem_type": "single_label_classification",
        }

    def check_columns(self, features: Mapping[str, Any], where: str) -> None:
        self.check_inputs(features, where)
        require_columns(features, [self.label_column], "task.label", where)
        feature = features[self.label_column]
        holds_names = _holds_names(feature)
        if holds_names is None:
            raise DataError(
                f"`task.label` must name a column of class names or of integers from 0, but column"
                f" `{self.label_column}` of {where} holds {type_name(feature)}"
            )
        if self.labels_are_names not in (None, holds_names):
            raise DataError(
                f"column `{self.label_column}` of {where} must hold {_kind(not holds_names)}, as the training split"
                f" does, but holds {_kind(holds_names)}"
            )

    def num_valid(self, labels: Tensor) -> Tensor:
        return labels.new_tensor(labels.numel())

    def loss_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the cross entropy, summed over the rows.

        Args:
            logits: the logits, of shape `[batch, num_labels]`.
            labels: the class indices, of shape `[batch]`.
        """
        return F.cross_entropy(at_least_fp32(logits), labels, reduction="sum")

    def predictions(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"predictions": logits.argmax(dim=-1).cpu(), "labels": labels.cpu()}

    def metrics(self, predictions: Mapping[str, Tensor]) -> dict[str, float]:
        predicted, labels = predictions["predictions"].numpy(), predictions["labels"].numpy()
        return {name: METRICS[name].compute(predicted, labels) for name in self.metric_names}

    @property
    def _known_class_names(self) -> tuple[str, ...]:
        assert self.class_names is not None, "call `resolve` first"
        return self.class_names

    def _find_class_names(self, train: Dataset, where: str) -> tuple[str, ...]:
        declared = getattr(train.features[self.label_column], "names", None)
        found = {value for value in train.unique(self.label_column) if value is not None}
        if declared is not None:
            names = tuple(declared)
        elif all(isinstance(value, int) for value in found):
            names = self._names_of_integers(found, where)
        else:
            names = tuple(sorted(found))
        if len(names) < 2:
            raise DataError(
                f"column `{self.label_column}` of {where} must hold at least two classes, but holds"
                f" {_shown(names) or 'none'}; a class without training rows can be listed in `task.labels`"
            )
        return names

    def _names_of_integers(self, found: set[int], where: str) -> tuple[str, ...]:
        absent = next((index for index in range(len(found)) if index not in found), None)
        if absent is not None:
            raise DataError(
                f"column `{self.label_column}` of {where} must number its classes from 0 without a gap, but holds"
                f" {_shown(sorted(found))} and no {absent}; renumber them, or list the class names in `task.labels`"
            )
        return tuple(str(index) for index in range(len(found)))

    def class_indices(self, rows: Dataset, where: str, first_row: int) -> list[int]:
        """Return the index in `class_names` of each row's label.

        Raises:
            DataError: a label is null, is an unknown name, or is out of range.
        """
        names = self._known_class_names
        declared = getattr(rows.features[self.label_column], "names", None)
        index_of: dict[Any, int] = {name: index for index, name in enumerate(names)}
        if declared is not None:  # the recipe may list the names in another order than the column
            index_of = {value: index_of[name] for value, name in enumerate(declared) if name in index_of}
        elif not self.labels_are_names:
            index_of = {index: index for index in range(len(names))}
        indices = [index_of.get(label) for label in rows[self.label_column]]
        if None in indices:
            place = indices.index(None)
            label = rows[self.label_column][place]
            if declared is not None and label is not None and 0 <= label < len(declared):
                label = declared[label]
            self._refuse(label, first_row + place, where)
        return [index for index in indices if index is not None]

    def _refuse(self, label: Any, row: int, where: str) -> None:
        place, names = cell(self.label_column, row, where), self._known_class_names
        if label is None:
            raise DataError(f"{place} is null; every row needs a label")
        if isinstance(label, int):
            raise DataError(f"{place} must be a class from 0 to {len(names) - 1}, but is {label}")
        raise DataError(
            f"{place} is the label {label!r}, which is not among the {len(names)} classes of the training split or of"
            f" `task.labels`: {_shown(names)}"
        )


def _holds_names(feature: Any) -> bool | None:
    """Return whether a label column holds class names, also as a `ClassLabel`, or indices; None for other types."""
    dtype = str(getattr(feature, "dtype", ""))
    if getattr(feature, "names", None) is not None or dtype in STRING_TYPES:
        return True
    return False if dtype.startswith(("int", "uint")) else None


def _places(names: Sequence[str]) -> dict[str, int]:
    """Return the index of each name, keyed by the case-folded name without outer spaces.

    The keys are the names themselves if two names have the same key.
    """
    folded = {name.strip().casefold(): index for index, name in enumerate(names)}
    return folded if len(folded) == len(names) else {name: index for index, name in enumerate(names)}


def _kind(names: bool) -> str:
    return "class names" if names else "integers"


def _shown(values: Sequence[Any]) -> str:
    return listed(values, _NAMES_SHOWN)
