"""The identity of a training: the facts that are equal for two runs that may share a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from trainer.base.extensions import registered
from trainer.base.text import dotted_leaves, listed
from trainer.recipe.schema import Recipe

# Keys that do not change the training: a run may resume with other values.
_HOW = (
    "name", "parallel", "activation_checkpointing", "compile", "cuda_graphs", "evaluation", "checkpoint", "logging",
    "data", "expects",
)  # fmt: skip
_HOW_TRAINING = (
    "micro_batch_size", "micro_batch_tokens", "stop_at_step", "check_replicas", "max_bad_steps",
    "on_spike", "spike_window", "spike_factor", "max_rewinds",
)  # fmt: skip
_WHERE_MODEL = ("name_or_path", "tokenizer", "revision")  # the weights are the checkpoint's
_MOST, _LONGEST = 20, 200  # differences in a message, and characters of one of their values
_ROWS = "data.train"  # the key of the hash of rows in an identity
FROZEN_WEIGHTS = "frozen_weights"
"""The key of the digest of frozen weights in `model` of an identity, if the recipe freezes weights."""


def identity(
    recipe: Recipe,
    content_hash: str,
    beside: Mapping[str, Any] | None = None,
    second: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the facts that define a training.

    Args:
        content_hash: the hash of the prepared training split.
        beside: further facts of the model by name, outside of training and checkpoints; None for a missing one. They
            replace keys of the recipe.
        second: facts of a second model that stand for keys of the recipe, by section and key.
    """
    sections = recipe.model_dump(mode="json", exclude=set(_HOW))
    how_task = ("metrics", *(row.name.removeprefix("task.") for row in registered("head")))  # keys of output heads, too
    for section, keys in (("training", _HOW_TRAINING), ("model", _WHERE_MODEL), ("task", how_task)):
        for key in keys:
            sections[section].pop(key, None)
    for section, facts in second.items():
        sections[section] |= facts
    sections["model"] |= {name: fact for name, fact in (beside or {}).items() if fact is not None}
    # The hash stands for the rows; other keys of the data count only if they change the order of rows or the texts.
    data: dict[str, Any] = {"group_by_length": recipe.data.group_by_length, "train": content_hash}
    if weights := recipe.data.source_weights:
        data["mixture"] = weights
    if recipe.data.date is not None:
        data["date"] = recipe.data.date
    return {**sections, "data": data}


def is_partly_frozen(identity: Mapping[str, Any]) -> bool:
    """Return whether a training leaves weights as they are, so that its checkpoints do not hold them."""
    model = identity.get("model")
    if not isinstance(model, Mapping):
        return False
    return bool(model.get("adapter") or (model.get("freeze") and not model.get("unfreeze_at_step")))


def differences(saved: Mapping[str, Any], present: Mapping[str, Any]) -> str:
    """Return the differences between the identity of a checkpoint and that of this run in words; empty if none."""
    was, now = dotted_leaves(saved), dotted_leaves(present)
    differing = [
        "the prepared training rows differ (data, tokenizer or `data.max_length`)"
        if key == _ROWS
        else f"`{key[:_LONGEST]}` was {was.get(key)!r:.{_LONGEST}} and is {now.get(key)!r:.{_LONGEST}}"
        for key in sorted(was.keys() | now.keys())
        if was.get(key) != now.get(key)
    ]
    return listed(differing, _MOST, "; ") if differing else ""
