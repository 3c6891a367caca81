"""Rules on the keys of the tasks of embeddings, which `section.py` passes; it imports this module, so not back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainer.features.embeddings.names import HIGHEST_SCALE, PAIR_LOSSES, TEACHER_LOSSES
from trainer.recipe.paths import shown_value
from trainer.recipe.schema.section import Contradiction, clash, repeated


def of_tuples(keys: Any) -> Iterator[Contradiction]:
    """Yield the contradictions of the keys that all these tasks have."""
    yield from repeated("task.texts", [*keys.texts, *([keys.score] if keys.score else [])])
    if keys.loss == "multiple_negatives":
        if keys.score is not None:
            problem = f"is {shown_value(keys.score)}, but `task.loss` multiple_negatives reads no score"
            others = "cosent, angle or cosine" if "cosent" in keys.joint_losses else "margin_mse or kl_divergence"
            yield clash(f"{problem}; remove it, or use the loss {others}", "task.score", "task.loss")
    else:
        if keys.mask_duplicates:
            text = f"does not apply to `task.loss` {keys.loss}; remove it"
            yield clash(text, "task.mask_duplicates", "task.loss")
        if keys.score is None:
            yield clash(f"is missing, but `task.loss` {keys.loss} needs it; set it", "task.score", "task.loss")
    if keys.loss in TEACHER_LOSSES and len(keys.texts) < 3:
        text = f"must name a query and two or more documents for `task.loss` {keys.loss}, but names two columns"
        yield clash(f"{text}; add one", "task.texts", "task.loss")
    if keys.loss != "kl_divergence" and keys.changed("teacher_temperature"):
        text = f"applies to the loss kl_divergence, but `task.loss` is {keys.loss}; remove it"
        yield clash(text, "task.teacher_temperature", "task.loss")


def of_embedding(keys: Any) -> Iterator[Contradiction]:
    """Yield the contradictions of the keys of dense embeddings."""
    yield from _of_dimensions(keys)
    if keys.learn_temperature and keys.temperature < 1 / HIGHEST_SCALE:
        text = f"must be at least {1 / HIGHEST_SCALE} to be learned, but is {keys.temperature}; increase it"
        yield clash(text, "task.temperature", "task.learn_temperature")
    if keys.loss in TEACHER_LOSSES and keys.learn_temperature:
        text = f"does not apply to `task.loss` {keys.loss}; set it to false"
        yield clash(text, "task.learn_temperature", "task.loss")
    if keys.loss not in PAIR_LOSSES:
        if "spearman" in keys.metrics:
            text = f'has "spearman", which needs scores of pairs, but `task.loss` is {keys.loss}; use "mrr"'
            yield clash(text, "task.metrics", "task.loss")
        return
    if len(keys.texts) != 2:
        number = len(keys.texts)
        text = f"must name two columns for `task.loss` {keys.loss}, but names {number}; remove the others"
        yield clash(text, "task.texts", "task.loss")
    for metric in keys.metrics:
        if metric != "spearman":
            problem = f'has "{metric}", which needs positives, but `task.loss` is {keys.loss}, with scores'
            yield clash(f'{problem}; set it to ["spearman"]', "task.metrics", "task.loss")
    for key in keys.changed("temperature", "learn_temperature") if keys.loss == "cosine" else []:
        yield clash("does not apply to `task.loss` cosine; remove it", f"task.{key}", "task.loss")


def _of_dimensions(keys: Any) -> Iterator[Contradiction]:
    yield from repeated("task.dimensions", keys.dimensions or [])
    if keys.dimension_weights is not None and len(keys.dimension_weights) != len(keys.dimensions or []):
        number, expected = len(keys.dimension_weights), len(keys.dimensions or [])
        text = f"must have one weight for each of `task.dimensions`, {expected}, but has {number}"
        yield clash(text, "task.dimension_weights", "task.dimensions")
