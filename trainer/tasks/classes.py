"""The bases of tasks with named classes, and of tasks with one class for each row."""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.base.errors import DataError, Problems, UsageError
from trainer.base.text import number_in
from trainer.parallel.copying import to_device
from trainer.parallel.dtypes import at_least_fp32
from trainer.recipe.schema import ClassificationKeys
from trainer.tasks.metrics.metric import Metric
from trainer.tasks.metrics.table import METRICS, merit
from trainer.tasks.task import Task
from trainer.tasks.text.columns import NAMES_SHOWN, STRING_TYPES, cell, require_kind, shown
from trainer.tasks.types import Dataset, EvaluatedSplit

_CLASSES_PICTURED = 30  # a larger matrix of confusions cannot be read, and each evaluation stores one
PROBABILITY_DIGITS = 6  # after the point, in predictions


class Labelled(Task):
    """A task with a column of labels; a subclass decides where among its fields this one stands."""

    label_column: str


@dataclass(frozen=True, kw_only=True)
class NamedClasses(Labelled):
    """Base class of tasks that assign named classes.

    Attributes:
        class_names: the name of class `i` at index `i`; None until `resolve` finds the names in the training split.
        labels_are_names: whether the training split holds class names, not indices. Other splits must do the same,
            because a wrong index cannot be detected.
        common_names: names that all data sets share, which do not show that two sets of classes are related.
    """

    class_names: tuple[str, ...] | None = None
    labels_are_names: bool | None = None
    labelled: bool = True
    common_names: ClassVar[tuple[str, ...]] = ()

    @property
    def cell_kinds(self) -> dict[str, Literal["text", "class"]]:
        return {**dict.fromkeys(self.columns, "text"), self.label_column: "class"}

    def without_data(self, names: Sequence[str]) -> Self:
        return self.with_classes(tuple(names), None) if self.class_names is None else self

    def with_classes(self, names: tuple[str, ...], labels_are_names: bool | None) -> Self:
        """Return the task with these classes."""
        return self.changed(class_names=names, labels_are_names=labels_are_names)

    def without_labels(self) -> Self:
        return self.changed(labelled=False, metric_names=())

    def require_same_kind(self, are_names: bool, names: str, numbers: str, where: str) -> None:
        """Require labels of the kind of the training split, because a wrong index cannot be detected.

        Args:
            are_names: whether this split holds names.
            names: the kind of labels that are names, for the message.
            numbers: the other kind.
        """
        if self.labels_are_names not in (None, are_names):
            expected, present = (numbers, names) if are_names else (names, numbers)
            raise DataError(
                f"column `{self.label_column}` of {where} must hold {expected}, as the training split does, but holds"
                f" {present}; write the labels of both splits in the same form"
            )

    def in_checkpoint_order(self, checkpoint: Sequence[str], chosen: bool) -> tuple[Self, list[str]]:
        from trainer.tasks.class_choices import in_checkpoint_order

        task, notes = in_checkpoint_order(self, checkpoint, chosen, places)
        return task, notes

    def conversion_notes(self, features: Mapping[str, Any]) -> list[str]:
        """Return a note on labels that are converted to classes, for example from true and false."""
        dtype = str(getattr(features.get(self.label_column), "dtype", ""))
        if dtype == "bool":
            return [f"column `{self.label_column}` holds true and false: class 0 is false, and class 1 is true"]
        if dtype.startswith("float"):
            return [f"column `{self.label_column}` holds numbers such as 1.0, which are read as the numbers of classes"]
        return []

    def model_options(self) -> dict[str, Any]:
        names = self._known_class_names
        return {
            "num_labels": len(names),
            "id2label": dict(enumerate(names)),
            "label2id": {name: index for index, name in enumerate(names)},
        }

    def find_names(self, feature: Any, labels: set[Any], where: str) -> tuple[str, ...]:
        """Return the class names of a label column.

        Args:
            labels: the labels of the split; None is ignored.

        Raises:
            DataError: there are fewer than two classes, or integers have a gap.
        """
        declared, labels = getattr(feature, "names", None), labels - {None}
        if declared is not None:
            names = tuple(declared)
        elif labels and all(isinstance(value, bool) for value in labels):
            names = ("false", "true")
        elif all(isinstance(value, int | float) for value in labels):
            names = self._names_of_integers(labels, where)
        else:
            # Sorted, because a set has another order in each process, and all ranks need the same classes.
            names = tuple(sorted(labels))
            self._require_no_numbers(names, where)
        if len(names) < 2:
            raise DataError(
                f"column `{self.label_column}` of {where} must hold at least two classes, but holds"
                f" {shown(names) or 'none'}; a class without training rows can be listed in `task.labels`"
            )
        return names

    def _names_of_integers(self, labels: set[float], where: str) -> tuple[str, ...]:
        self._require_no_numbers(sorted(labels), where)  # not NaN, see `resolve`
        # A gap would be a class without rows, or a typing error; the user decides which.
        absent = next((index for index in range(len(labels)) if index not in labels), None)
        if absent is not None:
            names = [str(int(value)) for value in sorted(labels)]
            listed_names = json.dumps(names) if len(names) <= NAMES_SHOWN else ""
            raise DataError(
                f"column `{self.label_column}` of {where} must number its classes from 0 without a gap, but holds"
                f" {shown(sorted(map(int, labels)))} and no {absent}; renumber them"
                + (f", or set `task.labels` to their names, such as {listed_names}" if listed_names else "")
            )
        return tuple(str(index) for index in range(len(labels)))

    def _require_no_numbers(self, labels: Sequence[float | str], where: str) -> None:
        """Refuse labels of which all are numbers, and some have a fraction.

        Raises:
            DataError: they are so.
        """
        numbers = [number_in(value) if isinstance(value, str) else value for value in labels]
        fraction = next((place for place, number in enumerate(numbers) if number is not None and number % 1), None)
        if None in numbers or fraction is None:
            return
        names = json.dumps([str(value) for value in labels]) if len(labels) <= NAMES_SHOWN else "names"
        raise DataError(
            f"column `{self.label_column}` of {where} must hold class names or integers from 0, but holds the number"
            f" {labels[fraction]}; to predict numbers, use `task.type` sequence_regression; if they are names of"
            f" classes, set `task.labels` to {names}"
        )

    def index_of(self, feature: Any) -> tuple[dict[Any, int], list[str] | None]:
        """Return the index in `class_names` of each label of the type `feature`, and the names that it declares."""
        declared = getattr(feature, "names", None)
        index_of: dict[Any, int] = {name: index for index, name in enumerate(self._known_class_names)}
        if declared is not None:  # the recipe may list the names in another order than the column
            index_of = {value: index_of[name] for value, name in enumerate(declared) if name in index_of}
        elif not holds_names(feature):
            index_of = dict(self._numbers)
        return index_of, declared

    def unknown(self, label: Any, declared: list[str] | None, place: str) -> DataError:
        """Return the error of a label that is null or has no index."""
        names = self._known_class_names
        if declared is not None and label is not None and 0 <= label < len(declared):
            label = declared[label]
        if label is None:
            return DataError(f"{place} is null; every row needs a label")
        if isinstance(label, int | float):
            numbers = [*self._numbers]
            classes = f"from 0 to {len(names) - 1}" if numbers == [*range(len(names))] else f"of {shown(numbers)}"
            return DataError(f"{place} must be a class {classes}, but is {label}")
        return DataError(
            f"{place} is the label {label!r}, which is not among the {len(names)} classes of the training split or of"
            f" `task.labels`: {shown(names)}"
        )

    def _with_probabilities(self, found: dict[str, Tensor], probabilities: Callable[[], Tensor]) -> dict[str, Tensor]:
        """Add the probabilities `[rows, num_labels]`, given in fp64, for metrics that read them."""
        reads = any(METRICS[name].reads == "probabilities" for name in self.metric_names)
        # From fp64, because equal logits would differ in fp32 by their place in a batch.
        return {**found, "probabilities": probabilities().float()} if reads else found

    def metrics(self, predictions: Mapping[str, Tensor]) -> dict[str, float]:
        found: dict[str, Any] = super().metrics(predictions)
        for prefix, name in [(prefix, name) for name in found if (prefix := METRICS[name].of_classes)]:
            # A class behind the last one of labels and predictions has no number.
            numbers = zip_longest(self._known_class_names, found.pop(name), fillvalue=math.nan)
            found |= {f"{prefix}/{one}": float(number) for one, number in numbers}
        return found

    def pictures(self, predictions: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the pictures of metrics, by their names."""
        drawn = {name: draw for name in self.metric_names if (draw := METRICS[name].picture)}
        given = [predictions[key].numpy() for key in ("probabilities", "labels") if drawn]
        return {name: draw(*given) for name, draw in drawn.items()}

    def named_probabilities(self, row: Sequence[float]) -> dict[str, float]:
        """Return the probability of each class, by its name."""
        pairs = zip(self._known_class_names, row, strict=True)
        return {name: round(value, PROBABILITY_DIGITS) for name, value in pairs}

    @property
    def _numbers(self) -> Mapping[int, int]:
        """The index of each integer that stands for a class in a column: of their names, or else the index itself."""
        return self._numbered_names or {index: index for index in range(len(self._known_class_names))}

    @property
    def _numbered_names(self) -> Mapping[int, int]:
        """The index of each class with an integer as its name, such as 10 or 10.0, but not 010."""
        numbered = [
            (match[1], name, index)
            for index, name in enumerate(self._known_class_names)
            if (match := re.fullmatch(r"(0|-?[1-9][0-9]*)(\.0)?", name))
        ]
        # Exact spellings last, so that the class `10` wins over `10.0` for the number 10.
        return {int(number): index for number, name, index in sorted(numbered, key=lambda entry: entry[0] == entry[1])}

    @property
    def _known_class_names(self) -> tuple[str, ...]:
        assert self.class_names is not None, "call `resolve` first"
        return self.class_names


@dataclass(frozen=True, kw_only=True)
class RowClasses(NamedClasses):
    """Base class of tasks that give each row one class.

    Attributes:
        class_weights: the weight of each class in the loss, by its name; "balanced": `resolve` computes the weights;
            None: all are 1.
        label_smoothing: the share of the target that is spread evenly over all classes.
        positive: the class that the metric `f1` counts as positive; None: the second one.
    """

    class_weights: Literal["balanced"] | Mapping[str, float] | None = None
    label_smoothing: float = 0.0
    positive: str | None = None

    unencoded_fields = ("metric_names", "class_weights", "label_smoothing", "positive")

    @property
    def rows_are_labels(self) -> bool:
        return self.class_weights is None

    def check_inputs(self, features: Mapping[str, Any], where: str) -> None:
        """Check all columns of a split except the label column.

        Raises:
            DataError: a column is missing or has the wrong type.
        """
        raise NotImplementedError

    def resolve(self, train: Dataset, where: str) -> Self:
        self.check_columns(train.features, where)
        labels = set(train[self.label_column])
        if any(value != value for value in labels):  # NaN
            row = next(index for index, value in enumerate(train[self.label_column]) if value != value)
            raise DataError(f"{cell(self.label_column, row, where)} is NaN; every row needs a label")
        names = self.class_names or self.find_names(train.features[self.label_column], labels, where)
        if (refused := self._of_one_class[:1]) and len(names) != 2:
            raise UsageError(
                f"`task.metrics` may name {refused[0]} only for two classes, but column `{self.label_column}` has"
                f" {len(names)}: {shown(names)}; use {refused[0]}_macro"
            )
        if self.positive is not None and self.positive not in names:
            raise UsageError(
                f"`task.positive` must be one of the classes {shown(names)}, but is {self.positive!r}; use one"
            )
        task = self.with_classes(names, _row_holds_names(train.features[self.label_column]))
        if task.class_weights is None:
            return task
        from trainer.tasks.class_choices import resolved_weights

        return task.changed(class_weights=resolved_weights(task, train, where))

    def without_data(self, names: Sequence[str]) -> Self:
        """Return the task with weights of 1, because their values change no shape."""
        weights = self.class_weights
        task = super().without_data(tuple(weights) if isinstance(weights, Mapping) else names)
        return task if weights is None else task.changed(class_weights=dict.fromkeys(task._known_class_names, 1.0))

    def for_evaluation(self) -> Self:
        is_plain = self.class_weights is None and not self.label_smoothing
        return self if is_plain else self.changed(class_weights=None, label_smoothing=0.0)

    def _weights(self, dtype: torch.dtype) -> Tensor | None:
        """Return the weights of the classes `[num_labels]` on the CPU."""
        if self.class_weights is None:
            return None
        assert not isinstance(self.class_weights, str), "call `resolve` first"
        return torch.tensor([self.class_weights[name] for name in self._known_class_names], dtype=dtype)

    def model_options(self) -> dict[str, Any]:
        return {**super().model_options(), "problem_type": "single_label_classification"}

    def check_columns(self, features: Mapping[str, Any], where: str) -> None:
        problems = Problems()
        with problems.collect():
            self.check_inputs(features, where)
        with problems.collect():
            self._check_label(features, where)
        problems.raise_all()

    def _check_label(self, features: Mapping[str, Any], where: str) -> None:
        if not self.labelled:
            return
        needed, are_names = "a column of class names or of integers from 0", _row_holds_names
        require_kind(
            features, self.label_column, "task.label", where, lambda feature: are_names(feature) is not None, needed
        )
        # One CSV file may hold 007, which is a text, and another one only the number 10.
        numbers = {} if self.labels_are_names is None else self._numbered_names
        if not numbers or (not self.labels_are_names and [*numbers] == [*range(len(self._known_class_names))]):
            self.require_same_kind(bool(are_names(features[self.label_column])), "class names", "integers", where)

    def num_valid(self, labels: Tensor) -> Tensor:
        weights = self._weights(torch.float64)
        # With weights, torch divides by the sum of the weights and not by the number of rows; the same is done here.
        return labels.new_tensor(labels.numel()) if weights is None else weights.to(labels.device)[labels].sum()

    def label_weights(self, labels: Tensor) -> Tensor:
        weights = self._weights(torch.float32)
        return super().label_weights(labels) if weights is None else weights.to(labels.device)[labels]

    def loss_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the cross entropy, weighted and smoothed as in torch, of logits `[batch, num_labels]`."""
        scores = at_least_fp32(logits)
        weights = self._weights(scores.dtype)
        if weights is not None:
            weights = to_device(weights, scores.device)
        # A sum: the engine divides by the valid labels of the global batch.
        return F.cross_entropy(scores, labels, weights, reduction="sum", label_smoothing=self.label_smoothing)

    def predictions(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found = {"predictions": logits.argmax(dim=-1), "labels": labels}
        return self._with_probabilities(found, lambda: logits.double().softmax(-1))

    @property
    def _of_one_class(self) -> list[str]:
        return [name for name in self.metric_names if name in ClassificationKeys.of_one_class]

    def _measured(self, metric: Metric, name: str, predictions: Mapping[str, Tensor]) -> Any:
        if name in self._of_one_class:
            index = self._known_class_names.index(self.positive) if self.positive is not None else 1
            # Scikit-learn counts class 1 as positive, so the positive class becomes 1.
            predictions = {
                key: values[:, index] if key == "probabilities" else (values == index).long()
                for key, values in predictions.items()
            }
        return super()._measured(metric, name, predictions)

    def baselines(self, labels: Tensor | None, vocabulary: int | None) -> dict[str, float]:
        """Return the metrics of the best constant class, and the loss of the classes' shares."""
        if labels is None:
            return {}
        shares = torch.bincount(labels, minlength=len(self._known_class_names)) / len(labels)
        constants = {int(shares.argmax())}
        if self.positive is not None:
            constants.add(self._known_class_names.index(self.positive))
        given = self._with_probabilities({"labels": labels}, lambda: shares.expand(len(labels), -1))
        answers = [torch.full_like(labels, constant) for constant in sorted(constants)]
        baselines = [self.metrics({**given, "predictions": answer}) for answer in answers]
        best = {one: max(baselines, key=partial(merit, one))[one] for one in self.metric_names if one in baselines[0]}
        # `entr` is 0 for a class without rows, for which 0 times log 0 would be NaN.
        return {**best, "loss": float(torch.special.entr(shares).sum())}

    def picture(self, predictions: Mapping[str, Tensor], split: EvaluatedSplit | None) -> dict[str, Any] | None:
        names = self._known_class_names
        if len(names) > _CLASSES_PICTURED:
            return None
        # Each pair of label and prediction has a number, so one count of numbers gives the matrix.
        pairs = predictions["labels"] * len(names) + predictions["predictions"]
        counts = torch.bincount(pairs, minlength=len(names) ** 2).reshape(len(names), len(names))
        return {"classes": list(names), "confusion": counts.tolist(), **self.pictures(predictions)}

    @property
    def positive_class(self) -> str | None:
        return (self.positive or self._known_class_names[1]) if self._of_one_class else None

    def answers(self, logits: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"probabilities": at_least_fp32(logits).softmax(-1)}

    def readable(self, answers: Mapping[str, Tensor], split: EvaluatedSplit) -> list[dict[str, Any]]:
        """Return the class and the probability of each class, for each row."""
        names = self._known_class_names
        return [
            {
                "prediction": names[max(range(len(names)), key=row.__getitem__)],
                "probabilities": self.named_probabilities(row),
            }
            for row in answers["probabilities"].tolist()
        ]

    def class_indices(self, rows: Dataset, where: str, first_row: int) -> list[int]:
        """Return the index in `class_names` of each row's label.

        Raises:
            DataError: a label is null, is an unknown name, or is out of range.
        """
        index_of, declared = self.index_of(rows.features[self.label_column])
        indices = [index_of.get(label) for label in rows[self.label_column]]
        if None in indices:
            place = indices.index(None)
            place_name = cell(self.label_column, first_row + place, where)
            raise self.unknown(rows[self.label_column][place], declared, place_name)
        return [index for index in indices if index is not None]

    def empty_batch(self, shape: tuple[int, ...]) -> tuple[dict[str, Tensor], Tensor]:
        return {}, torch.zeros(shape[0], dtype=torch.long)


def holds_names(feature: Any) -> bool | None:
    """Return whether a label column holds class names, also as a `ClassLabel`, or indices; None for other types."""
    dtype = str(getattr(feature, "dtype", ""))
    if getattr(feature, "names", None) is not None or dtype in STRING_TYPES:
        return True
    return False if dtype.startswith(("int", "uint")) else None


def _row_holds_names(feature: Any) -> bool | None:
    """Return the same for a column with one label for each row, which may be true and false, or numbers such as 1.0."""
    is_converted = str(getattr(feature, "dtype", "")).startswith(("bool", "float"))
    return False if is_converted else holds_names(feature)


def places(names: Sequence[str]) -> dict[str, int]:
    """Return the index of each name, keyed by `plain_name`.

    The keys are the names themselves if two names have the same key.
    """
    folded = {plain_name(name): index for index, name in enumerate(names)}
    return folded if len(folded) == len(names) else {name: index for index, name in enumerate(names)}


def places_of(names: Sequence[str], others: Sequence[str]) -> list[int] | None:
    """Return the place in `others` of each class, compared without case and outer spaces; None if they differ."""
    found, indices = places(others), places(names)
    return [found[key] for key in indices] if found.keys() == indices.keys() else None


def plain_name(name: str) -> str:
    """Return the name of a class without case, outer and double spaces, invisible characters and forms of Unicode."""
    visible = "".join(char for char in unicodedata.normalize("NFKC", name) if unicodedata.category(char) != "Cf")
    return " ".join(visible.split()).casefold()
