"""Folders of sentence-transformers: poolings, dense layers, prompts and the like, which a recipe takes as they are.

A key of the recipe that contradicts the folder is refused. Differences that leave the embedding of a text as it is are
notes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import exp
from typing import Any

from safetensors import safe_open
from transformers.utils import SAFE_WEIGHTS_NAME

from trainer.base.errors import Problems, UsageError
from trainer.base.text import listed
from trainer.features.embeddings.embedding import EmbeddingTask
from trainer.features.embeddings.names import DENSE_ACTIVATIONS, POOLINGS, SCALE_FOLDER, DenseLayer
from trainer.features.embeddings.prompts import DOCUMENT, QUERY, prompt_of
from trainer.features.embeddings.section import Embedding
from trainer.models.hub_files import find_file
from trainer.models.sentence_files import MODULES, place_of, prompts_of, read_json, unreachable
from trainer.recipe.schema import Model, Recipe
from trainer.tasks.task import Task
from trainer.training.preparation import ModelFolder

_SETTINGS = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_OWN_CODE = "sentence_transformers."
_POOLINGS = {names.name: pooling for pooling, names in POOLINGS.items()}
"""The value of `task.pooling` by the name in sentence-transformers."""
_SWITCH = "pooling_mode_"  # the start of older keys
_FOLDER = re.compile(r"\w[\w.-]*")  # the path of a module inside the folder
_NO_LIMIT = 10**9  # tokenizers without a maximum length have an even larger one


@dataclass(frozen=True)
class FolderEmbedding(ModelFolder):
    """The embedding of a folder of sentence-transformers.

    `poolings` are values of `task.pooling`; several are joined. `prompts` are texts before other texts by name, and
    `default_prompt` is the name of the one that texts have by default. `temperature` is a learned one, which only
    folders of this project have.
    """

    poolings: tuple[str, ...]
    normalize: bool
    prompts: Mapping[str, str]
    default_prompt: str | None
    dense: tuple[DenseLayer, ...]
    pools_prompt: bool
    temperature: float | None

    def completed(self, task: Task) -> Task:
        assert isinstance(task, EmbeddingTask)
        return replace(
            task,
            poolings=self.poolings,
            normalize=self.normalize,
            prompts=task.prompts.of_folder(self.prompts, self.default_prompt, task.has_roles),
            dense=self.dense,
            pools_prompt=self.pools_prompt,
            temperature=self.temperature or task.temperature,
        )


def read_folder(recipe: Recipe) -> ModelFolder | None:
    """Return the embedding of the folder of a recipe's model; None if it is no folder of sentence-transformers.

    Raises:
        UsageError: a key of the recipe contradicts the folder, the task does not compute one of its modules, or a file
            cannot be read.
        RecipeError: several of these hold.
    """
    if recipe.model.is_random:
        return None
    try:
        modules = read_json(recipe.model, MODULES, list)
        if modules is None:
            return None
        assert isinstance(recipe.task, Embedding)
        folder = _Folder(recipe, recipe.task, modules)
        problems = Problems()
        poolings: tuple[str, ...] = ()
        dense: tuple[DenseLayer, ...] = ()
        with problems.collect():
            folder.require_modules()
            dense = folder.dense()
        with problems.collect():
            poolings = folder.poolings()
        for check in (folder.require_text, folder.require_length, folder.require_prompts):
            with problems.collect():
                check()
        problems.raise_all()
        return FolderEmbedding(
            tuple(folder.notes()),
            poolings,
            folder.normalizes,
            folder.prompts,
            folder.default_prompt,
            dense,
            folder.pools_prompt,
            folder.temperature() if recipe.task.learn_temperature else None,
        )
    except OSError:
        return ModelFolder((unreachable(recipe.model),))


class _Folder:
    def __init__(self, recipe: Recipe, keys: Embedding, modules: list[Any]) -> None:
        self._recipe, self._keys = recipe, keys
        self._place = place_of(recipe.model)
        self._modules = [module if isinstance(module, dict) else {} for module in modules]
        self._kinds = [str(module.get("type")) for module in self._modules]
        self._names = [kind.rpartition(".")[2] if kind.startswith(_OWN_CODE) else kind for kind in self._kinds]
        found = (read_json(recipe.model, name, dict) for name in _SETTINGS)
        self._settings: dict[str, Any] = next((settings for settings in found if settings is not None), {})

        config = read_json(recipe.model, "config_sentence_transformers.json", dict) or {}
        self._similarity = config.get("similarity_fn_name") or "cosine"
        self.prompts, self.default_prompt = prompts_of(config, self._place)
        self.normalizes = self._names[-1:] == ["Normalize"]
        self.pools_prompt = True

    def require_modules(self) -> None:
        others = self._names[:-1] if self.normalizes else self._names
        if others[:2] != ["Transformer", "Pooling"] or set(others[2:]) - {"Dense"}:
            raise UsageError(
                f"{self._place} with the modules {listed(self._names, 10)}, but `task.type` embedding computes"
                " Transformer, Pooling, Dense and Normalize only, in this order; use another model, or remove"
                f" {MODULES} from a copy to train and export it without the other modules"
            )
        if path := self._modules[0].get("path"):
            raise UsageError(
                f"{self._place} with its model in {path!r}; move the files of that folder next to {MODULES}"
            )
        if self._keys.normalize not in (None, self.normalizes):
            raise UsageError(
                f"{self._place} that {'scales' if self.normalizes else 'does not scale'} embeddings to a length of 1,"
                f" but `task.normalize` is {json.dumps(self._keys.normalize)}; set it to {json.dumps(self.normalizes)},"
                " or to null"
            )

    def dense(self) -> tuple[DenseLayer, ...]:
        """Return the dense layers of the folder; refuse one that the task does not compute."""
        numbers = [number for number, name in enumerate(self._names) if name == "Dense"]
        return tuple(self._dense(str(self._modules[number].get("path")), f"{number}_Dense") for number in numbers)

    def _dense(self, path: str, folder: str) -> DenseLayer:
        model = self._recipe.model
        config = read_json(model, f"{path}/config.json", dict) if _FOLDER.fullmatch(path) else None
        if config is None:
            raise UsageError(
                f"{self._place}, but {path}/config.json, which describes a dense layer, is missing; add it"
            )
        file, shapes = dense_weights(model, path)
        # The default of `Dense` in sentence-transformers is Tanh.
        name = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
        sizes = _size(config, "in_features"), _size(config, "out_features")
        layer = DenseLayer(file, folder, *sizes, config.get("bias") is not False, name)
        embedding = "sentence_embedding"
        other = [key for key in ("module_input_name", "module_output_name") if config.get(key) not in (None, embedding)]
        other += [key for key in ("use_residual",) if config.get(key)]
        if other or not name.startswith("torch.nn.") or layer.activation_name not in DENSE_ACTIVATIONS:
            problem = f"`{other[0]}` {config[other[0]]}" if other else f"the activation {name}"
            raise UsageError(
                f"{self._place} with {problem} in {path}, but dense layers map embeddings, with one of the activations"
                f" {listed(list(DENSE_ACTIVATIONS), 10)}; use another model"
            )
        expected: dict[str, tuple[int, ...]] = {"linear.weight": (layer.out_features, layer.in_features)}
        expected |= {"linear.bias": (layer.out_features,)} if layer.bias else {}
        if shapes != expected:
            raise UsageError(
                f"{self._place}, but {file} holds {shapes} and its config.json describes {expected}; correct one of"
                " them"
            )
        return layer

    def temperature(self) -> float | None:
        file = find_file(self._recipe.model, f"{SCALE_FOLDER}/{SAFE_WEIGHTS_NAME}")
        if file is None:
            return None
        with safe_open(file, framework="pt") as opened:
            # The file holds log(1 / temperature).
            return exp(-float(opened.get_tensor("log")))

    def poolings(self) -> tuple[str, ...]:
        """Return the poolings of the folder; refuse one that is unknown, or not that of the recipe."""
        if "Pooling" not in self._names:
            return ()
        path = str(self._modules[self._names.index("Pooling")].get("path"))
        config = read_json(self._recipe.model, f"{path}/config.json", dict) if _FOLDER.fullmatch(path) else None
        if config is None:
            raise UsageError(f"{self._place}, but {path}/config.json, which names its pooling, is missing; add it")
        found = _poolings_of(config, self._place)
        shown = " + ".join(found)
        if unknown := [name for name in found if name not in _POOLINGS]:
            raise UsageError(
                f"{self._place} with the pooling {unknown[0]}, but `task.pooling` supports"
                f" {listed(list(_POOLINGS), 10)}; use another model, or remove {MODULES} from a copy to train another"
                " pooling"
            )
        self.pools_prompt = config.get("include_prompt") is not False
        if self._keys.pooling is not None and [_POOLINGS[name] for name in found] != [self._keys.pooling]:
            fix = f'"{_POOLINGS[found[0]]}" or null' if len(found) == 1 else "null"
            raise UsageError(
                f'{self._place} with the pooling {shown}, but `task.pooling` is "{self._keys.pooling}"; set it to'
                f" {fix}, or remove {MODULES} from a copy to train another pooling"
            )
        return tuple(_POOLINGS[name] for name in found)

    def require_text(self) -> None:
        """Require the states and texts of the task: hidden states of the model, and texts as they are."""
        if self._settings.get("do_lower_case"):
            raise UsageError(
                f"{self._place} with `do_lower_case`, but texts are not converted here; convert the data, and set it to"
                " false in a copy"
            )
        output = self._settings.get("module_output_name", "token_embeddings")
        if output != "token_embeddings":
            raise UsageError(
                f"{self._place} with the output {output!r} of its model, but `task.type` embedding pools the last"
                " hidden states; use another model"
            )

    def require_length(self) -> None:
        """Require that the recipe states the maximum length, if its default is not that of the folder."""
        longest, data = self._longest, self._recipe.data
        if longest is None or longest == data.max_length or "max_length" in data.model_fields_set:
            return
        raise UsageError(
            f"{self._place} that cuts texts at {longest} tokens, but `data.max_length` is {data.max_length} by default;"
            f" set it to {longest}, or to the length that you want"
        )

    def require_prompts(self) -> None:
        """Require that no prompt of the recipe is another one than that of the folder."""
        for key, role in (("query_prompt", QUERY), ("document_prompt", DOCUMENT)):
            name = prompt_of(role, self.prompts) if self._keys.has_roles else self.default_prompt
            own, known = getattr(self._keys, key), self.prompts.get(name or "", "")
            if own is not None and known and own != known:
                raise UsageError(
                    f"{self._place} with the prompt {known!r} ({name}), but `task.{key}` is {own!r}; set it to null, or"
                    f" remove {MODULES} from a copy to train another prompt"
                )

    @property
    def _longest(self) -> int | None:
        """The tokens at which the folder cuts texts; None: it names no number."""
        longest = self._settings.get("max_seq_length")
        if longest is None:
            longest = (read_json(self._recipe.model, "tokenizer_config.json", dict) or {}).get("model_max_length")
        return int(longest) if isinstance(longest, int | float) and 1 < longest < _NO_LIMIT else None

    def notes(self) -> Iterator[str]:
        name = self._recipe.model.name_or_path
        if self._similarity != "cosine":
            yield (
                f"the similarity of {name} is {self._similarity}, but losses, metrics and the exported folder use the"
                " cosine"
            )
        if self._longest not in (None, self._recipe.data.max_length):
            yield (
                f"texts are cut at `data.max_length` {self._recipe.data.max_length} tokens, also by the exported"
                f" folder; {name} cuts at {self._longest}"
            )


def dense_weights(model: Model, path: str) -> tuple[str, dict[str, tuple[int, ...]]]:
    """Return the file of a dense layer in a folder of sentence-transformers, and the shapes of its tensors by name."""
    file = find_file(model, f"{path}/{SAFE_WEIGHTS_NAME}")
    if file is None:
        raise UsageError(
            f"{place_of(model)}, but {path}/{SAFE_WEIGHTS_NAME} is missing; save the model again with"
            " sentence-transformers, which writes safetensors"
        )
    with safe_open(file, framework="pt") as opened:
        return file, {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118


def _size(config: Mapping[str, Any], key: str) -> int:
    size = config.get(key)
    return size if isinstance(size, int) else 0


def _poolings_of(config: Mapping[str, Any], place: str) -> list[str]:
    """Return the poolings of a `Pooling` module, by their names in sentence-transformers."""
    modes = config.get("pooling_mode")
    if modes is None:
        found = [names.name for names in POOLINGS.values() if config.get(names.switch)]
        known = {names.switch for names in POOLINGS.values()}
        unknown = [key for key, value in config.items() if key.startswith(_SWITCH) and value and key not in known]
        # Without any switch, `Pooling` takes the mean by default.
        return [*found, *(key.removeprefix(_SWITCH) for key in unknown)] or ["mean"]
    if not isinstance(modes, str | list) or not modes:
        raise UsageError(f"{place}, but `pooling_mode` must be a name or a list of names, and is {modes!r}; correct it")
    return [modes] if isinstance(modes, str) else [str(mode) for mode in modes]
