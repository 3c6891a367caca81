"""Folders of sentence-transformers with sparse vectors, or with a vector for each token."""

from __future__ import annotations

import json
import string
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainer.base.errors import UsageError
from trainer.base.text import listed
from trainer.features.embeddings.embedding import EmbeddingTask
from trainer.features.embeddings.folder import dense_weights
from trainer.features.embeddings.multi_vector import MultiVectorTask
from trainer.features.embeddings.names import DenseLayer
from trainer.features.embeddings.section import MultiVectorEmbedding
from trainer.models.configuration import load_config
from trainer.models.sentence_files import MODULES, place_of, prompts_of, read_json, unreachable
from trainer.recipe.schema import Model, Recipe
from trainer.tasks.task import Task
from trainer.training.preparation import ModelFolder

_SETTINGS = "sentence_bert_config.json"
_IDENTITY = "torch.nn.modules.linear.Identity"
_ANOTHER = "use another model"
_ATTENTION = (
    f"set it to true in {_SETTINGS} of a copy, so that tokens attend to the mask tokens of queries: the training adapts"
    " the model to them"
)


@dataclass(frozen=True)
class PromptsOfFolder(ModelFolder):
    """The prompts of a folder, by name, and the name of its default prompt."""

    prompts: Mapping[str, str]
    default_prompt: str | None

    def completed(self, task: Task) -> Task:
        assert isinstance(task, EmbeddingTask)
        return replace(task, prompts=task.prompts.of_folder(self.prompts, self.default_prompt, task.has_roles))


@dataclass(frozen=True)
class TokenVectors(PromptsOfFolder):
    """The linear layer of a vector for each token, and the largest number of tokens."""

    dense: DenseLayer
    tokens: int

    def completed(self, task: Task) -> Task:
        task = super().completed(task)
        assert isinstance(task, MultiVectorTask)
        return replace(task, dense=(self.dense,), tokens=self.tokens)


def read_sparse(recipe: Recipe) -> ModelFolder | None:
    """Return the prompts of a folder of SparseEncoder; None if the model has no modules of sentence-transformers.

    Raises:
        UsageError: the task does not compute a module of the folder.
    """
    if recipe.model.is_random:
        return None
    try:
        modules = _modules(recipe.model)
        if modules is None:
            return None
        _require(recipe.model, [*modules], ["Transformer", "SpladePooling"], "sparse_embedding")
        pooling = read_json(recipe.model, f"{modules['SpladePooling']}/config.json", dict) or {}
        for key, value in (("pooling_strategy", "max"), ("activation_function", "relu")):
            _same(recipe.model, key, pooling.get(key), value, _ANOTHER)
        return PromptsOfFolder((), *_prompts(recipe.model))
    except OSError:
        return ModelFolder((unreachable(recipe.model),))


def read_multi_vector(recipe: Recipe) -> ModelFolder:
    """Return the linear layer of a folder of MultiVectorEncoder, or a new one, and the number of tokens of a text.

    Raises:
        UsageError: the task does not compute a module of the folder, or a key contradicts it.
    """
    keys, model, tokens = recipe.task, recipe.model, recipe.data.max_length
    assert isinstance(keys, MultiVectorEmbedding)
    hidden_size = load_config(model, {}).hidden_size
    layer = DenseLayer("", "1_Dense", hidden_size, keys.dimensions, False, _IDENTITY, recipe.training.seed)
    try:
        modules = None if model.is_random else _modules(model)
        if modules is None:
            return TokenVectors((), {}, None, layer, tokens)
        _require(model, [*modules], ["Transformer", "Dense", "MultiVectorMask", "Normalize"], "multi_vector_embedding")
        layer = layer._replace(file=_weights(model, modules["Dense"], layer))
        settings = read_json(model, _SETTINGS, dict) or {}
        expansion = settings.get("query_expansion") or {}
        _same(model, "query_expansion", bool(expansion), keys.query_expansion, "set `task.query_expansion` to {}")
        if expansion:
            _same(model, "strategy", expansion.get("strategy"), "fixed", _ANOTHER)
            _same(model, "token", expansion.get("token"), None, "remove it from a copy if it is the mask token")
            _same(model, "attend", expansion.get("attend", False), True, _ATTENTION)
            _same(model, "length", expansion.get("length"), keys.query_length, "set `task.query_length` to {}")
        mask = read_json(model, f"{modules['MultiVectorMask']}/config.json", dict) or {}
        _same(model, "keep_only_token_ids", mask.get("keep_only_token_ids"), None, _ANOTHER)
        if skipped := mask.get("skiplist_words") or []:
            _same(model, "skiplist_words", skipped, [*string.punctuation], _ANOTHER)
        fix = "set `task.skip_punctuation` to " + ("true" if skipped else "false")
        _same(model, "skiplist_words", skipped, [*string.punctuation] if keys.skip_punctuation else [], fix)
        return TokenVectors((), *_prompts(model), layer, tokens)
    except OSError:
        return TokenVectors((unreachable(model),), {}, None, layer, tokens)


def _modules(model: Model) -> dict[str, str] | None:
    """Return the folders of the modules by the names of their classes; None: there are none."""
    modules = read_json(model, MODULES, list)
    if modules is None:
        return None
    named = {str(module.get("type")).rpartition(".")[2]: str(module.get("path")) for module in modules}
    # The name of the first module in older folders.
    return {"Transformer" if name == "MLMTransformer" else name: path for name, path in named.items()}


def _require(model: Model, found: list[str], expected: list[str], task: str) -> None:
    if found != expected:
        raise UsageError(
            f"{place_of(model)} with the modules {listed(found, 10)}, but `task.type` {task} computes"
            f" {', '.join(expected)}; use another model, or remove {MODULES} from a copy to train it without them"
        )


def _same(model: Model, name: str, found: Any, expected: Any, fix: str) -> None:
    """Refuse a setting of a folder that the task does not compute; `{}` in the fix is the value of the folder."""
    if found != expected:
        shown, computed = json.dumps(found), json.dumps(expected)
        raise UsageError(
            f"{place_of(model)} with `{name}` {shown}, but this recipe computes {computed}; {fix.format(shown)}"
        )


def _weights(model: Model, path: str, layer: DenseLayer) -> str:
    """Return the file of the linear layer of a folder."""
    file, shapes = dense_weights(model, path)
    expected = {"linear.weight": (layer.out_features, layer.in_features)}
    if shapes != expected:
        raise UsageError(
            f"{place_of(model)} with a linear layer of {shapes}, but `task.dimensions` {layer.out_features} needs"
            f" {expected}; set it to the size of the folder, or use another model"
        )
    return file


def _prompts(model: Model) -> tuple[Mapping[str, str], str | None]:
    config = read_json(model, "config_sentence_transformers.json", dict) or {}
    return prompts_of(config, place_of(model))
