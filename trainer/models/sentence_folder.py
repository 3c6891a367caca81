"""Folders of sentence-transformers: poolings, dense layers, prompts and the like, which a recipe takes as they are.

A key of the recipe that contradicts the folder is refused. Differences that leave the embedding of a text as it is are
notes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from math import exp
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers.utils import SAFE_WEIGHTS_NAME

from trainer.base.errors import Problems, UsageError
from trainer.base.text import listed
from trainer.models.hub_files import find_file
from trainer.recipe.schema import Model, Recipe
from trainer.recipe.sentence import (
    ACTIVATIONS,
    DENSE_ACTIVATIONS,
    DOCUMENT,
    POOLINGS,
    QUERY,
    SCALE_FOLDER,
    DenseLayer,
    SentenceFolder,
    SentenceKeys,
    prompt_of,
)

_MODULES = "modules.json"
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


def sentence_folder(recipe: Recipe) -> SentenceFolder | None:
    """Return the embedding of the folder of a recipe's model; None if it is no folder of sentence-transformers.

    Raises:
        UsageError: a key of the recipe contradicts the folder, the task does not compute one of its modules, or a file
            cannot be read.
        RecipeError: several of these hold.
        OSError: the hub cannot be reached.
    """
    keys = recipe.task.sentences
    if recipe.model.is_random or keys is None:
        return None
    if keys.scores_pairs:
        return _cross_encoder(recipe, keys)
    modules = _read(recipe.model, _MODULES, list)
    if modules is None:
        return None
    folder = _Folder(recipe, keys, modules)
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
    return SentenceFolder(
        poolings,
        folder.normalizes,
        folder.prompts,
        folder.default_prompt,
        tuple(folder.notes()),
        dense=dense,
        pools_prompt=folder.pools_prompt,
        temperature=folder.temperature() if keys.learns_temperature else None,
    )


def _cross_encoder(recipe: Recipe, keys: SentenceKeys) -> SentenceFolder | None:
    """Return the activation of the folder of a cross-encoder; None if the model has none."""
    model = recipe.model
    place = f"`model.name_or_path` is {str(model.name_or_path)!r}, a folder of sentence-transformers"
    config = _read(model, "config_sentence_transformers.json", dict) or {}
    modules = _read(model, _MODULES, list) or []
    kinds = [str(module.get("type")) if isinstance(module, dict) else "" for module in modules]
    if [kind.endswith(".Transformer") for kind in kinds] not in ([], [True]):
        raise UsageError(
            f"{place} with the modules {listed(kinds, 10)}, but `task.type` {recipe.task.type} trains one Transformer"
            " with a classification head; use another model"
        )
    prompts, default = _prompts_of(config, place)
    if prompt := prompts.get(default or ""):
        raise UsageError(f"{place} with the prompt {prompt!r}, which rerankers do not add; use another model")
    name = _activation_of(config, _read(model, "config.json", dict) or {})
    if name is None:
        return None
    known = {names.rpartition(".")[2]: activation for activation, names in ACTIVATIONS.items()}
    activation = known.get(str(name).rpartition(".")[2])
    if activation is None:
        raise UsageError(f"{place} with the activation {name!r}, but {listed(list(known), 10)} are supported")
    if keys.activation not in (None, activation):
        raise UsageError(
            f'{place} with the activation {activation}, but `task.activation` is "{keys.activation}"; set it to null'
        )
    return SentenceFolder((), False, {}, None, (), activation)


def _activation_of(config: Mapping[str, Any], described: Mapping[str, Any]) -> str | None:
    """Return the activation of a cross-encoder; `described` is the configuration of its model."""
    older = described.get("sentence_transformers")
    # Three generations of the format, the newest first.
    names = [settings.get("activation_fn") for settings in (config, older) if isinstance(settings, dict)]
    return next(filter(None, (*names, described.get("sbert_ce_default_activation_function"))), None)


def embedding_notes(recipe: Recipe) -> list[str]:
    """Return notes on the folder of a recipe's model; the errors are those of `sentence_folder`, but for `OSError`."""
    try:
        folder = sentence_folder(recipe)
    except OSError:
        return [unreachable(recipe)]
    return [] if folder is None else list(folder.notes)


def unreachable(recipe: Recipe) -> str:
    return (
        f"`model.name_or_path`: whether {recipe.model.name_or_path} has a {_MODULES} of sentence-transformers is not"
        " checked: the hub cannot be reached"
    )


class _Folder:
    def __init__(self, recipe: Recipe, keys: SentenceKeys, modules: list[Any]) -> None:
        self._recipe, self._keys = recipe, keys
        self._place = f"`model.name_or_path` is {str(recipe.model.name_or_path)!r}, a folder of sentence-transformers"
        self._modules = [module if isinstance(module, dict) else {} for module in modules]
        self._kinds = [str(module.get("type")) for module in self._modules]
        self._names = [kind.rpartition(".")[2] if kind.startswith(_OWN_CODE) else kind for kind in self._kinds]
        found = (_read(recipe.model, name, dict) for name in _SETTINGS)
        self._settings: dict[str, Any] = next((settings for settings in found if settings is not None), {})

        config = _read(recipe.model, "config_sentence_transformers.json", dict) or {}
        self._similarity = config.get("similarity_fn_name") or "cosine"
        self.prompts, self.default_prompt = _prompts_of(config, self._place)
        self.normalizes = self._names[-1:] == ["Normalize"]
        self.pools_prompt = True

    def require_modules(self) -> None:
        others = self._names[:-1] if self.normalizes else self._names
        if others[:2] != ["Transformer", "Pooling"] or set(others[2:]) - {"Dense"}:
            raise UsageError(
                f"{self._place} with the modules {listed(self._names, 10)}, but `task.type` embedding computes"
                " Transformer, Pooling, Dense and Normalize only, in this order; use another model, or remove"
                f" {_MODULES} from a copy to train and export it without the other modules"
            )
        if path := self._modules[0].get("path"):
            raise UsageError(
                f"{self._place} with its model in {path!r}; move the files of that folder next to {_MODULES}"
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
        config = _read(model, f"{path}/config.json", dict) if _FOLDER.fullmatch(path) else None
        if config is None:
            raise UsageError(
                f"{self._place}, but {path}/config.json, which describes a dense layer, is missing; add it"
            )
        file = find_file(model, f"{path}/{SAFE_WEIGHTS_NAME}")
        if file is None:
            raise UsageError(
                f"{self._place}, but {path}/{SAFE_WEIGHTS_NAME} is missing; save the model again with"
                " sentence-transformers, which writes safetensors"
            )
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
        with safe_open(file, framework="pt") as opened:
            shapes = {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118
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
        config = _read(self._recipe.model, f"{path}/config.json", dict) if _FOLDER.fullmatch(path) else None
        if config is None:
            raise UsageError(f"{self._place}, but {path}/config.json, which names its pooling, is missing; add it")
        found = _poolings_of(config, self._place)
        shown = " + ".join(found)
        if unknown := [name for name in found if name not in _POOLINGS]:
            raise UsageError(
                f"{self._place} with the pooling {unknown[0]}, but `task.pooling` supports"
                f" {listed(list(_POOLINGS), 10)}; use another model, or remove {_MODULES} from a copy to train another"
                " pooling"
            )
        self.pools_prompt = config.get("include_prompt") is not False
        if self._keys.pooling is not None and [_POOLINGS[name] for name in found] != [self._keys.pooling]:
            fix = f'"{_POOLINGS[found[0]]}" or null' if len(found) == 1 else "null"
            raise UsageError(
                f'{self._place} with the pooling {shown}, but `task.pooling` is "{self._keys.pooling}"; set it to'
                f" {fix}, or remove {_MODULES} from a copy to train another pooling"
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
                    f" remove {_MODULES} from a copy to train another prompt"
                )

    @property
    def _longest(self) -> int | None:
        """The tokens at which the folder cuts texts; None: it names no number."""
        longest = self._settings.get("max_seq_length")
        if longest is None:
            longest = (_read(self._recipe.model, "tokenizer_config.json", dict) or {}).get("model_max_length")
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


def _size(config: Mapping[str, Any], key: str) -> int:
    size = config.get(key)
    return size if isinstance(size, int) else 0


def _prompts_of(config: Mapping[str, Any], place: str) -> tuple[dict[str, str], str | None]:
    """Return the prompts by name, null ones as empty texts, and the name of the default one."""
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name")
    if not isinstance(prompts, dict) or any(
        text is not None and not isinstance(text, str) for text in prompts.values()
    ):
        raise UsageError(f"{place}, but `prompts` must be texts by name, and are {prompts!r}; correct them in a copy")
    if default is not None and default not in (*prompts, QUERY[0], DOCUMENT[0]):  # these two are empty by default
        names = listed(list(prompts), 10) or "none"
        raise UsageError(
            f"{place} with the `default_prompt_name` {default!r}, but its prompts are {names}; name one of them, or"
            " null, in a copy"
        )
    return {name: text or "" for name, text in prompts.items()}, default


def _poolings_of(config: Mapping[str, Any], place: str) -> list[str]:
    """Return the poolings of a `Pooling` module, by their names in sentence-transformers."""
    modes = config.get("pooling_mode")
    if modes is None:
        found = [names.name for names in POOLINGS.values() if config.get(names.switch)]
        known = {names.switch for names in POOLINGS.values()}
        unknown = [key for key, value in config.items() if key.startswith(_SWITCH) and value and key not in known]
        return [*found, *(key.removeprefix(_SWITCH) for key in unknown)] or ["mean"]
    if not isinstance(modes, str | list) or not modes:
        raise UsageError(f"{place}, but `pooling_mode` must be a name or a list of names, and is {modes!r}; correct it")
    return [modes] if isinstance(modes, str) else [str(mode) for mode in modes]


def _read(model: Model, name: str, kind: type) -> Any:
    """Return the content of a JSON file of a model's folder; None if there is no such file."""
    file = find_file(model, name)
    if file is None:
        return None
    try:
        found = json.loads(Path(file).read_text("utf-8"))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, kind):
        what = "a list" if kind is list else "an object"
        raise UsageError(
            f"`model.name_or_path` has a {name} that must hold {what} in JSON, but {file} holds none; correct it"
        )
    return found
