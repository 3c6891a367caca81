"""The folder of a cross-encoder of sentence-transformers, which a recipe takes as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainer.base.errors import UsageError
from trainer.base.text import listed
from trainer.features.rerankers.reranker import ACTIVATIONS, RerankerTask
from trainer.features.rerankers.section import Reranker
from trainer.models.sentence_files import MODULES, place_of, prompts_of, read_json, unreachable
from trainer.recipe.schema import Recipe
from trainer.tasks.task import Task
from trainer.training.preparation import ModelFolder


@dataclass(frozen=True)
class CrossEncoderFolder(ModelFolder):
    """The activation of a folder, a value of `task.activation`."""

    activation: str

    def completed(self, task: Task) -> Task:
        assert isinstance(task, RerankerTask)
        return replace(task, activation=task.activation or self.activation)


def read_folder(recipe: Recipe) -> ModelFolder | None:
    """Return the activation of the folder of a recipe's model; None if it has none.

    Raises:
        UsageError: the task does not compute the folder, a key of the recipe contradicts it, or a file cannot be read.
    """
    try:
        return None if recipe.model.is_random else _read(recipe)
    except OSError:
        return ModelFolder((unreachable(recipe.model),))


def _read(recipe: Recipe) -> CrossEncoderFolder | None:
    assert isinstance(recipe.task, Reranker)
    model = recipe.model
    place = place_of(model)
    config = read_json(model, "config_sentence_transformers.json", dict) or {}
    modules = read_json(model, MODULES, list) or []
    kinds = [str(module.get("type")) if isinstance(module, dict) else "" for module in modules]
    if [kind.endswith(".Transformer") for kind in kinds] not in ([], [True]):
        raise UsageError(
            f"{place} with the modules {listed(kinds, 10)}, but `task.type` {recipe.task.type} trains one Transformer"
            " with a classification head; use another model"
        )
    prompts, default = prompts_of(config, place)
    if prompt := prompts.get(default or ""):
        raise UsageError(f"{place} with the prompt {prompt!r}, which rerankers do not add; use another model")
    name = _activation_of(config, read_json(model, "config.json", dict) or {})
    if name is None:
        return None
    known = {names.rpartition(".")[2]: activation for activation, names in ACTIVATIONS.items()}
    activation = known.get(str(name).rpartition(".")[2])
    if activation is None:
        raise UsageError(f"{place} with the activation {name!r}, but {listed(list(known), 10)} are supported")
    if recipe.task.activation not in (None, activation):
        raise UsageError(
            f'{place} with the activation {activation}, but `task.activation` is "{recipe.task.activation}"; set it to'
            " null"
        )
    return CrossEncoderFolder((), activation)


def _activation_of(config: Mapping[str, Any], described: Mapping[str, Any]) -> str | None:
    """Return the activation of a cross-encoder; `described` is the configuration of its model."""
    older = described.get("sentence_transformers")
    # Three generations of the format, the newest first.
    names = [settings.get("activation_fn") for settings in (config, older) if isinstance(settings, dict)]
    return next(filter(None, (*names, described.get("sbert_ce_default_activation_function"))), None)
