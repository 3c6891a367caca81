"""The model of a first recipe: a pretrained one from the hub's cache or the hub, or else a small one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from huggingface_hub import constants

from trainer.base.errors import TrainerError
from trainer.models.configuration import load_config
from trainer.recipe.local_parts import LocalParts
from trainer.recipe.schema.task_keys import Start
from trainer.tools.check import local_files_only
from trainer.tools.doctor.network import answer_of, endpoint_of
from trainer.tools.init.draft import Draft

SAMPLE = "sample"
"""The word for the model of a shipped sample: a small one with random weights, which needs no network."""

_SMALLER = {
    "google-bert/bert-base-uncased": "google/bert_uncased_L-4_H-256_A-4",
    "Qwen/Qwen3-0.6B": "HuggingFaceTB/SmolLM2-135M-Instruct",
}
"""Models for machines without a GPU, which train them in minutes."""
_CLASSES_BY_DEFAULT = 2
"""Classes of a configuration of transformers that names none."""
_SMALL_WIDTH, _FASTER = 256, 5
"""Hidden size up to which models take a higher learning rate, and by how much: the miniatures of BERT were fine-tuned
with 3e-5 to 3e-4 (https://huggingface.co/google/bert_uncased_L-4_H-256_A-4)."""


@dataclass(frozen=True)
class Proposed:
    """A model as a recipe names it, and the reason for it."""

    name: str
    why: str


def proposed_model(draft: Draft, start: Start, has_gpu: bool) -> Proposed:
    """Return a pretrained model that fits the device, from the hub's cache or the hub; else the sample."""
    names = [name for name in (start.model, _SMALLER.get(start.model)) if name]
    names = names if has_gpu else names[::-1]
    for name in names:
        if _is_cached(draft, name):
            return Proposed(name, "pretrained, in the hub's cache")
    if _hub_answers():
        return Proposed(names[0], "pretrained, from the hub")
    return Proposed(SAMPLE, "no hub answers")


def _is_cached(draft: Draft, name: str) -> bool:
    try:
        recipe = draft.resolved([f"model.name_or_path={name}", "training.micro_batch_size=1"]).recipe
    except TrainerError:  # of the user's keys: named later
        return False
    return not any(part.startswith("`model.") for part in LocalParts.of(recipe).unchecked)


def _hub_answers() -> bool:
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        return answer_of(endpoint_of(os.environ)) < 400
    except (OSError, ValueError):
        return False


def learning_rate(draft: Draft, start: Start, name: str | None) -> tuple[float, str]:
    """Return the learning rate of a pretrained model, and its reason."""
    is_small = name in _SMALLER.values()
    if not is_small:
        try:
            recipe = draft.resolved(["training.micro_batch_size=1"]).recipe
            with local_files_only():
                if LocalParts.of(recipe).has_model:
                    is_small = getattr(load_config(recipe.model, {}), "hidden_size", _SMALL_WIDTH + 1) <= _SMALL_WIDTH
        except (TrainerError, TypeError):  # of the user's keys: named later; a list of sizes
            pass
    rate = start.learning_rate * _FASTER if is_small else start.learning_rate
    return float(f"{rate:g}"), "higher than that of a large model" if is_small else ""


def needs_new_head(draft: Draft, messages: Sequence[str], classes: Sequence[object]) -> bool:
    """Return whether the head of a checkpoint has another number of classes, by its weights or its configuration.

    Args:
        messages: the problems of a check, which reads weights that are on this machine.
        classes: those of the data; empty: there are none.
    """
    if any("set `model.new_head` to true" in message for message in messages):
        return True
    recipe = draft.resolved(["training.micro_batch_size=1"]).recipe
    local = LocalParts.of(recipe)
    is_checked = not any(part.startswith("`model.") for part in local.unchecked)
    if not classes or is_checked or recipe.model.name_or_path is None or not (local.has_model or _hub_answers()):
        return False
    try:
        config = load_config(recipe.model, {})
    except TrainerError:  # `trainer run` names it
        return False
    stored = len(config.to_diff_dict().get("id2label") or range(_CLASSES_BY_DEFAULT))
    heads = [name for name in config.architectures or () if name.endswith("Classification")]
    return bool(heads) and stored != len(classes)
