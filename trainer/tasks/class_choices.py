"""Choices that few trainings make: the order of the classes of a checkpoint, and weights of classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from trainer.base.errors import DataError, UsageError
from trainer.base.text import listed
from trainer.tasks.text.columns import NAMES_SHOWN, shown
from trainer.tasks.types import Dataset

Places = Callable[[Sequence[str]], Mapping[str, int]]


def in_checkpoint_order(task: Any, checkpoint: Sequence[str], chosen: bool, places: Places) -> tuple[Any, list[str]]:
    """Return a task of `NamedClasses` in that order; see `Classes`. `places` ignores case and outer spaces of names."""
    names: tuple[str, ...] = task.class_names
    ours, theirs = places(names), places(checkpoint)
    if not task.labels_are_names and not chosen:  # an index means the same in both
        pairs = [f"{index} is {name!r}" for index, name in enumerate(checkpoint)]
        is_new = len(names) == len(checkpoint) and list(ours) != list(theirs)
        note = f"labels are the numbers of the checkpoint's classes: {listed(pairs, NAMES_SHOWN)}"
        return task, [f"{note}; if they are not, set `task.labels`"] if is_new else []
    # No class in common: the data is of another task, and the head is only a start.
    common = ours.keys() & theirs.keys() - places(task.common_names).keys()
    theirs_shown = f"the checkpoint's classes are {shown(checkpoint)}"
    if not common:
        same_size = len(names) == len(checkpoint)
        return task, [f"{theirs_shown}: its head starts from these, to learn others"] if same_size else []
    if chosen:
        same = list(ours) == list(theirs)
        return task, [] if same else [f"{theirs_shown}, in another order or number than `task.labels`"]
    if ours.keys() != theirs.keys():
        raise UsageError(
            f"column `{task.label_column}` must hold the classes of the checkpoint, or none of them, but"
            f" {theirs_shown} and the training split has {shown(names)}; list the classes in `task.labels`, in the"
            " order of the checkpoint"
        )
    # The order of the checkpoint: its head gives each class the logit that it was trained for.
    ordered = tuple(names[ours[key]] for key in theirs)
    if ordered == names:
        return task, []
    note = f"classes are in the order of the checkpoint: {shown(ordered)}"
    return task.with_classes(ordered, task.labels_are_names), [note]


def resolved_weights(task: Any, train: Dataset, where: str) -> Mapping[str, float]:
    """Return the weights of the classes of a task by name; balanced ones are `rows / (classes * rows of the class)`."""
    names: tuple[str, ...] = task.class_names
    weights: Mapping[str, float] | str = task.class_weights
    if isinstance(weights, str):
        counts = np.bincount(task.class_indices(train, where, 0), minlength=len(names))
        if not counts.all():
            raise DataError(
                f"`task.class_weights` is balanced, but {where} has no row of the class"
                f" {names[int(counts.argmin())]!r}; write the weights, or remove the class from `task.labels`"
            )
        balanced: list[float] = (counts.sum() / (len(names) * counts)).tolist()
        return dict(zip(names, balanced, strict=True))
    if unknown := [name for name in weights if name not in names]:
        raise UsageError(
            f"`task.class_weights` must name classes, but names {unknown[0]!r}; the classes are {shown(names)}"
        )
    if missing := [name for name in names if name not in weights]:
        raise UsageError(
            f"`task.class_weights` must have a weight for each of the {len(names)} classes, but has none for"
            f" {shown(missing)}; add it"
        )
    return weights
