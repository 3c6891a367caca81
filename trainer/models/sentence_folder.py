"""Folders of sentence-transformers: how their embeddings differ from those of a recipe.

A recipe states its own embedding, so a folder with another one is refused. Differences that leave the embedding of a
text as it is are notes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer.base.errors import Problems, UsageError
from trainer.base.text import listed
from trainer.models.hub_files import find_file
from trainer.recipe.schema import Embedding, Model, Recipe

_MODULES = "modules.json"
_SETTINGS = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_OWN_CODE = "sentence_transformers."
_POOLINGS = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
"""The value of `task.pooling` by the name in sentence-transformers."""
_SWITCH = "pooling_mode_"  # the start of older keys, such as `pooling_mode_cls_token`: true
_FOLDER = re.compile(r"\w[\w.-]*")  # the path of a module inside the folder
_NO_LIMIT = 10**9  # tokenizers without a maximum length have an even larger one


def embedding_notes(recipe: Recipe) -> list[str]:
    """Return notes on the differences between the folder of a recipe's model and the recipe.

    Raises:
        UsageError: the folder's embedding is another one, or a file cannot be read.
        RecipeError: several of these hold.
    """
    if not isinstance(recipe.task, Embedding) or recipe.model.is_random:
        return []
    try:
        modules = _read(recipe.model, _MODULES, list)
    except OSError:
        return [
            f"`model.name_or_path`: whether {recipe.model.name_or_path} has a {_MODULES} of sentence-transformers is"
            " not checked: the hub cannot be reached"
        ]
    if modules is None:
        return []
    folder = _Folder(recipe, recipe.task, modules)
    problems = Problems()
    for check in (folder.require_modules, folder.require_pooling, folder.require_text):
        with problems.collect():
            check()
    problems.raise_all()
    return list(folder.notes())


class _Folder:
    def __init__(self, recipe: Recipe, task: Embedding, modules: list[Any]) -> None:
        self._recipe, self._task = recipe, task
        self._place = f"`model.name_or_path` is {str(recipe.model.name_or_path)!r}, a folder of sentence-transformers"
        self._modules = [module if isinstance(module, dict) else {} for module in modules]
        self._kinds = [str(module.get("type")) for module in self._modules]
        self._names = [kind.rpartition(".")[2] if kind.startswith(_OWN_CODE) else kind for kind in self._kinds]
        found = (_read(recipe.model, name, dict) for name in _SETTINGS)
        self._settings: dict[str, Any] = next((settings for settings in found if settings is not None), {})

    def require_modules(self) -> None:
        """Require the modules that the task computes, with the normalisation of the recipe."""
        *others, last = [*self._names, None] if self._names[-1:] != ["Normalize"] else self._names
        if others != ["Transformer", "Pooling"]:
            raise UsageError(
                f"{self._place} with the modules {listed(self._names, 10)}, but `task.type` embedding computes"
                " Transformer, Pooling and Normalize only, in this order; use another model, or remove"
                f" {_MODULES} from a copy to train and export it without the other modules"
            )
        if path := self._modules[0].get("path"):
            raise UsageError(
                f"{self._place} with its model in {path!r}; move the files of that folder next to {_MODULES}"
            )
        normalizes = last is not None
        if normalizes != self._task.normalize:
            raise UsageError(
                f"{self._place} that {'scales' if normalizes else 'does not scale'} embeddings to a length of 1, but"
                f" `task.normalize` is {json.dumps(self._task.normalize)}; set it to {json.dumps(normalizes)}"
            )

    def require_pooling(self) -> None:
        """Require the pooling of the recipe."""
        if "Pooling" not in self._names:
            return
        path = str(self._modules[self._names.index("Pooling")].get("path"))
        config = _read(self._recipe.model, f"{path}/config.json", dict) if _FOLDER.fullmatch(path) else None
        if config is None:
            raise UsageError(f"{self._place}, but {path}/config.json, which names its pooling, is missing; add it")
        found = _pooling_of(config)
        name = _POOLINGS.get(found)
        if name is None:
            raise UsageError(
                f"{self._place} with the pooling {found}, but `task.pooling` supports {listed(list(_POOLINGS), 10)};"
                f" use another model, or remove {_MODULES} from a copy to train another pooling"
            )
        if name != self._task.pooling:
            raise UsageError(
                f'{self._place} with the pooling {found}, but `task.pooling` is "{self._task.pooling}"; set it to'
                f' "{name}", or remove {_MODULES} from a copy to train another pooling'
            )

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

    def notes(self) -> Iterator[str]:
        """Iterate over notes on prompts, similarity and maximum length."""
        model = self._recipe.model
        config = _read(model, "config_sentence_transformers.json", dict) or {}
        prompts = config.get("prompts")
        shown = [f"{name} {text!r}" for name, text in prompts.items() if text] if isinstance(prompts, dict) else []
        if shown:
            default = config.get("default_prompt_name")
            yield (
                f"prompts of {model.name_or_path} are not added to texts, and the exported folder has none: "
                + listed(shown, 10)
                + (f"; sentence-transformers adds {default!r} by default" if default else "")
                + "; write them into the data"
            )
        similarity = config.get("similarity_fn_name") or "cosine"
        if similarity != "cosine":
            yield (
                f"the similarity of {model.name_or_path} is {similarity}, but losses, metrics and the exported folder"
                " use the cosine"
            )
        longest = self._settings.get("max_seq_length")
        if longest is None:
            longest = (_read(model, "tokenizer_config.json", dict) or {}).get("model_max_length")
        own = self._recipe.data.max_length
        if isinstance(longest, int | float) and longest < _NO_LIMIT and longest != own:
            yield (
                f"texts are cut at `data.max_length` {own} tokens, also by the exported folder;"
                f" {model.name_or_path} cuts at {longest}"
            )


def _pooling_of(config: Mapping[str, Any]) -> str:
    """Return the pooling of a `Pooling` module, by its name in sentence-transformers; several are joined by a plus."""
    modes = config.get("pooling_mode")
    if modes is None:
        switches = [key.removeprefix(_SWITCH) for key, value in config.items() if key.startswith(_SWITCH) and value]
        modes = [switch.removesuffix("_tokens").removesuffix("_token") for switch in switches] or ["mean"]
    return modes if isinstance(modes, str) else " + ".join(map(str, modes if isinstance(modes, list) else [modes]))


def _read(model: Model, name: str, kind: type) -> Any:
    """Return the content of a JSON file of a model's folder; None if there is no such file.

    Raises:
        OSError: the hub cannot be reached.
        UsageError: the file holds no JSON value of this kind.
    """
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
            f"`model.name_or_path` has a {name} that must hold {what} in JSON, but {file} holds none; mend it"
        )
    return found
