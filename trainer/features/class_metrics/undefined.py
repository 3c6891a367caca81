"""Warnings on metrics that are undefined for classes of the validation split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.base.text import listed
from trainer.data.split import EncodedSplit
from trainer.tasks.classes import NamedClasses
from trainer.training.run_data import PreparedData

_SHOWN = 3  # names in a warning


def notes(data: PreparedData) -> list[str]:
    """Return warnings on metrics of classes without validation rows, and of classes that all of these rows have."""
    task, validation = data.task, data.validation
    if validation is None or not isinstance(task, NamedClasses) or not task.class_names:
        return []
    names = np.array(task.class_names)
    counts = _counts(validation, len(names))
    if counts is None:
        return []
    absent, everywhere = names[counts == 0].tolist(), names[counts == len(validation)].tolist()
    return [
        *_of(task.metric_names, "has no row of", absent, ("recall", "roc_auc", "average_precision")),
        *_of(task.metric_names, "has in each row", everywhere, ("roc_auc",)),
    ]


def _counts(split: EncodedSplit, num_classes: int) -> NDArray[Any] | None:
    """Return the rows of each class `[classes]`; None: rows have other labels."""
    if "labels" in split.scalars:
        return np.bincount(split.scalars["labels"], minlength=num_classes)
    lists = split.arrays.get("labels")
    return None if lists is None else np.sum(lists, 0, np.int64)


def _of(metrics: Sequence[str], words: str, classes: Sequence[str], scores: tuple[str, ...]) -> Iterator[str]:
    affected = [name for name in metrics if name.startswith(scores) and not name.endswith("_micro")]
    if classes and affected:
        yield (
            f"the validation split {words} {listed([repr(name) for name in classes], _SHOWN)}, for which"
            f" {listed(affected, len(affected))} {'are' if len(affected) > 1 else 'is'} undefined: a number of that"
            " class is NaN, and a mean leaves it out"
        )
