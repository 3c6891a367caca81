"""The recipe of a trained model, for `trainer evaluate` and `trainer predict`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trainer.base.errors import UsageError
from trainer.base.extensions import registered
from trainer.base.file_formats import file_formats
from trainer.recipe.paths import shown_value
from trainer.recipe.reading.files import RECIPE_FILE
from trainer.recipe.reading.loading import ResolvedRecipe, load_recipe, load_values
from trainer.recipe.schema import Data, FileData, Model
from trainer.recipe.strategies import STRATEGIES

CONFIG, ADAPTER = "config.json", "adapter_config.json"
"""The files by which folders of whole models and of adapters are known."""

_JOINING = ("join_timeout", "stall_timeout")
_TEXT_KEYS = ("encoding", "delimiter", "quotes")
_SECTIONS = ("data", "evaluation", "model", "parallel", "training")  # that this module reads


@dataclass(frozen=True)
class Trained:
    """A model folder, its recipe with the model of the folder, and notes for the user.

    `start` is the model at the start of the training, as its recipe has it.
    """

    folder: Path
    resolved: ResolvedRecipe
    notes: tuple[str, ...]
    start: Model


def load_trained(
    source: Path, recipe: str | None, overrides: Sequence[str], num_ranks: int, evaluates: bool
) -> Trained:
    """Return a trained model with its recipe.

    Args:
        source: an exported model folder, or the folder of a run: then its best model, or else its last one.
        recipe: a recipe for a folder of another origin; None: the recipe in the folder.
        overrides: the `key=value` overrides of the command line.
        evaluates: whether the validation split is needed; no other split needs to exist.

    Raises:
        UsageError: there is no model or no recipe.
        RecipeError: the recipe or an override is wrong.
    """
    folder = _model_folder(source)
    if recipe is not None:
        values = load_recipe(recipe).recipe.model_dump(mode="json")
    elif (folder / RECIPE_FILE).is_file():
        values = _read(folder / RECIPE_FILE)
    else:
        raise UsageError(f"`FOLDER` must hold {RECIPE_FILE}, but {folder} has none; name its recipe with --recipe")
    # Read before the folder takes the place of the first model in the recipe.
    start = _first_model(values["model"])
    values["model"] = {"name_or_path": str(folder)}
    for row in registered("second_model"):  # it is for training only
        values[row.name.partition(".")[0]] = None
    of_features = {row.name for row in registered("keys")}
    for row in registered("splits"):  # for training rows only
        if row.name in of_features:
            values["data"].pop(row.name.removeprefix("data."), None)
    overrides = [*overrides, *_set_data(values, folder, overrides, evaluates)]
    # A forward pass needs no global batch; this size divides among any ranks.
    training = values.setdefault("training", {})
    size = training.get("micro_batch_size")
    training["global_batch_size"] = (size if isinstance(size, int) and size > 0 else 8) * num_ranks
    values["evaluation"] = {"batch_size": values.get("evaluation", {}).get("batch_size", 32)}
    notes = [] if evaluates else [f"model: {folder}"]  # an evaluation names it among its results
    notes += _set_strategy(values, overrides, num_ranks)
    resolved = load_values(values, overrides)
    if not evaluates:
        notes += _text_notes(resolved.recipe.data, overrides)
    return Trained(folder, resolved, tuple(notes), start)


def _text_notes(data: Data, overrides: Sequence[str]) -> list[str]:
    """Return a note on keys of the training by which text files are read."""
    keys = data.changed(*_TEXT_KEYS) if isinstance(data, FileData) else []
    shown = [
        f"`data.{key}` {shown_value(getattr(data, key))}"
        for key in keys
        if not any(override.startswith(f"data.{key}=") for override in overrides)
    ]
    return [f"the input is read as the files of the training: {', '.join(shown)}"] if shown else []


def _first_model(values: dict[str, Any]) -> Model:
    try:
        return Model.model_validate(values)
    except ValidationError as error:
        raise UsageError(
            f"{RECIPE_FILE} must name the model of the training, but its `model` is wrong: {error}"
        ) from error


def _set_data(values: dict[str, Any], folder: Path, overrides: Sequence[str], evaluates: bool) -> list[str]:
    """Replace the training split, which may be gone, and return further overrides for that.

    A share of the training split that is held out for validation needs that split.
    """
    data = values["data"]
    if not evaluates:
        of_rows = [row.name.removeprefix("data.") for row in registered("rows")]
        of_formats = [key for row in file_formats().values() for key in row.keys]
        kept = {key: data[key] for key in ("max_length", *of_rows, *of_formats, *_TEXT_KEYS) if key in data}
        values["data"] = {"source": "files", "train": str(folder / CONFIG), **kept}  # any file: it is not read
        return []
    key = "data.validation="
    chosen = [override.removeprefix(key) for override in overrides if override.startswith(key)]
    if any(override.startswith(("data.train=", "data.source=")) for override in overrides):
        return []
    if chosen and not _is_share(chosen[0]):
        return [f"data.train={chosen[0]}"]
    if not chosen and isinstance(data.get("validation"), str | list):
        data["train"] = data["validation"]
    return []


def _set_strategy(values: dict[str, Any], overrides: Sequence[str], num_ranks: int) -> list[str]:
    """Replace a strategy that needs an optimizer or several ranks, unless the user chose one; return a note on it."""
    parallel = values.get("parallel", {})
    strategy = parallel.get("strategy", "ddp")
    chosen = any(override.startswith("parallel.") for override in overrides)
    is_known = isinstance(strategy, str) and strategy in STRATEGIES  # or else it is refused with the other keys
    if chosen or not parallel or not is_known or (num_ranks > 1 and not STRATEGIES[strategy].package):
        return []
    values["parallel"] = {"strategy": "ddp", **{key: parallel[key] for key in _JOINING if key in parallel}}
    reason = "one process" if num_ranks == 1 else "no optimizer"
    note = f"`parallel.strategy` is ddp here, since there is {reason}; the training used {strategy}"
    return [] if strategy == "ddp" else [note]


def _is_share(text: str) -> bool:
    try:
        return isinstance(json.loads(text), float | None)
    except ValueError:
        return False


def folder_with(source: Path, *names: str) -> Path | None:
    """Return the folder of a model with one of some files: `source` itself, or of a run, the best model or the last."""
    for folder in (source, source / "best", source / "model"):
        if any((folder / name).is_file() for name in names):
            return folder.resolve()
    return None


def _model_folder(source: Path) -> Path:
    if (source / ADAPTER).is_file():
        raise UsageError(
            f"`RUN` must hold merged weights, but {source} is an adapter in the format of PEFT; name the run's folder,"
            " or a folder that `trainer export` wrote without --adapter"
        )
    if any(source.glob("*.onnx")) and not any(source.glob("*.safetensors")):
        raise UsageError(
            f"`RUN` must hold weights, but {source} holds a graph of ONNX; name the run's folder, or a folder that"
            " `trainer export` wrote without --to onnx"
        )
    if (holder := folder_with(source, CONFIG)) is not None:
        return holder
    if not source.is_dir():
        raise UsageError(f"`RUN` must be the folder of a run or of a model, but {source} does not exist; name another")
    raise UsageError(
        f"`RUN` must hold a model, but {source} has neither best/ nor model/; train it to its end, or write the"
        f" model of a checkpoint: trainer export {source} FOLDER"
    )


def _read(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{file} must be a recipe, but cannot be read: {error}; name one with --recipe") from error
    if not isinstance(values, dict):
        raise UsageError(f"{file} must be a recipe, but is no object; name one with --recipe")
    for name in _SECTIONS:
        if not isinstance(values.get(name, None if name in ("data", "model") else {}), dict):
            raise UsageError(f"{file} must be a recipe, but its `{name}` is no object; name one with --recipe")
    return values
