"""Metrics of classes by their probabilities, such as ROC AUC, and metrics of each class."""

from __future__ import annotations

from typing import Any

_UNDEFINED = ("recall", "roc_auc", "average_precision")  # for a class without rows


def warnings(data: Any, is_part: bool) -> list[str]:
    """Return the warnings of `undefined.notes` on prepared data."""
    if not any(name.startswith(_UNDEFINED) for name in data.task.metric_names):
        return []
    from trainer.features.class_metrics.undefined import notes

    return notes(data)
