"""`trainer export`: from a checkpoint to a Hugging Face folder, on one machine.

The checkpoint holds the weights, the configuration and the tokenizer. It is read tensor by tensor; nothing in it is
unpickled, imported or run.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers.initialization import no_init_weights
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from trainer.base.disk import UNFINISHED, remove
from trainer.base.errors import TrainerError, UsageError
from trainer.base.extensions import load, registered, resolved
from trainer.checkpoint.format import FACTS, MODEL_FOLDER, SavedState, open_verified
from trainer.checkpoint.identity import FROZEN_WEIGHTS
from trainer.checkpoint.store import CheckpointStore
from trainer.engine.precision import COMPUTE_DTYPES, PrecisionName
from trainer.engine.state import BUFFER_PREFIX, MODEL_PREFIX
from trainer.models.added import added_of, is_added, values_of, without_added, write_added
from trainer.models.fill import build_base
from trainer.models.freezing import adapt
from trainer.models.merged_weights import MergedWeights
from trainer.models.peft_folder import write_adapter
from trainer.models.quantized_parts import quantized_in
from trainer.models.quantizing import quantized_base
from trainer.models.statistics import persistent_buffers
from trainer.models.weight_files import UnknownModelError, described_model, plan_files
from trainer.parallel.shards.boxes import Box, TensorPart
from trainer.parallel.shards.digest import joined, own_digest
from trainer.recipe.schema import Adapter, Model, Recipe
from trainer.tasks.exported import Card, ExportFormat, Program
from trainer.tasks.registry import build_task, card_of
from trainer.training.certificate import Certificate, require_not_refused
from trainer.training.model_card import CARD_NAME, complete_folder
from trainer.training.row_encoding import with_folder
from trainer.use.verifying import Opened, Verification, verify

SAFETENSORS = "safetensors"

# Copied files are not checked here, so weights, pickles and code are refused by name.
_NEVER_BEGINS = ("model.", "model-", "pytorch_model", "adapter_")
_NEVER_ENDS = (".bin", ".ckpt", ".h5", ".msgpack", ".pickle", ".pkl", ".pt", ".pth", ".py", ".safetensors")


@dataclass(frozen=True)
class Exported:
    """The result of an export: its checkpoint, its files of weights, and notes for the user."""

    checkpoint: Path
    step: int
    folder: Path
    weights: tuple[str, ...]
    num_bytes: int
    notes: tuple[str, ...]
    certificate: Certificate | None = None


def export(
    checkpoint: Path,
    folder: Path,
    dtype: PrecisionName = "fp32",
    adapter: bool = False,
    verification: Verification | None = None,
    to: str = SAFETENSORS,
) -> Exported:
    """Write the model of a checkpoint as a Hugging Face folder, whole or not at all.

    Args:
        checkpoint: The folder of a checkpoint, or of a run: then its newest whole checkpoint.
        folder: An empty or missing folder.
        dtype: The type of the weights.
        adapter: Whether to write the adapter alone, in the format of PEFT.
        verification: The comparison with the trained model; None: there is none.
        to: The format of the model: weights for transformers, or the name of an `ExportFormat`.

    Raises:
        NotTheTrainedModelError: Another program that opens the folder gets other outputs.
        UsageError: The checkpoint is broken or holds no model, the folder is in use, or the format is unknown.
        TrainerError: The folder cannot be written.
    """
    place, export_format = _free_place(folder), _format(to)
    state, notes = _open(checkpoint)
    if verification is None:
        require_not_refused(state.folder)
    config, beside = _beside_weights(state.folder, state.file_names)
    if adapter:
        _require_adapter(state)
    if export_format is not None:
        export_format.require(dtype, adapter)
    if adapter and GENERATION_CONFIG_NAME in beside:
        notes.append(
            f"PEFT and transformers take the generation configuration of the base, which may end texts elsewhere; set"
            f" that of the folder, as its {CARD_NAME} shows"
        )
    # On the same disk as its place, so that the last step is a rename.
    temporary = place.with_name(f"{UNFINISHED}{place.name}")
    try:
        remove(temporary)  # of an export that was killed here
        temporary.mkdir(parents=True)
        for name in beside:
            (temporary / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(state.folder / MODEL_FOLDER / name, temporary / name)
        type_ = COMPUTE_DTYPES.get(dtype, torch.float32)
        _write_dtype(config, type_, temporary)
        described = described_model(config)
        # Before the weights are written, so that a refusal costs no time.
        opened = None if verification is None else _opened(state, described, dtype, adapter, export_format)
        weights = _write_weights(state, described, temporary, type_, adapter)
        if export_format is not None:
            recipe = _whole_recipe(state) if _task_type(state) else None
            weights = [export_format.convert(temporary, type(described), recipe)]
        certificate = None
        if opened is not None and verification is not None:
            certificate = _verified_folder(state, described, temporary, opened, verification)
        complete_folder(temporary, place, state.facts.origin, state.facts.progress, certificate, export_format)
    except UnknownModelError as error:
        raise UsageError(
            f"`CHECKPOINT` must hold a model of transformers, but {state.folder / MODEL_FOLDER / CONFIG_NAME} describes"
            f" none that its tensors fit: {error}; export with the versions that saved it, which its {FACTS} names"
        ) from error
    except (OSError, SafetensorError) as error:
        raise TrainerError(
            f"the model could not be written to {place}: {error}; make room or restore the permissions of"
            f" {place.parent}, then export again"
        ) from error
    finally:
        with suppress(OSError):
            remove(temporary)
    written = tuple(sorted(path.name for path in weights))
    num_bytes = sum((place / name).stat().st_size for name in written)
    return Exported(state.folder, state.facts.progress.step, place, written, num_bytes, tuple(notes), certificate)


def _format(name: str) -> ExportFormat | None:
    """Return the registered format; None: weights of safetensors."""
    load()
    if name == SAFETENSORS:
        return None
    formats = {row.name: row.value for row in registered("export")}
    if name not in formats:
        names = ", ".join((SAFETENSORS, *formats))
        raise UsageError(f"`--to` must be a registered format, {names}, but is {name!r}; name another")
    found: ExportFormat = resolved(formats[name])()
    return found


def _write_dtype(config: dict[str, Any], type_: torch.dtype, folder: Path) -> None:
    """Name the type of the weights in the configuration of a new folder, as transformers writes it."""
    typed = _with_dtype(config, str(type_).removeprefix("torch."))
    if typed != config:
        text = json.dumps(typed, indent=2, sort_keys=True) + "\n"
        (folder / CONFIG_NAME).write_text(text, encoding="utf-8")


def _write_weights(
    state: SavedState, described: Any, folder: Path, type_: torch.dtype, adapter: bool
) -> Sequence[Path]:
    """Write the weights of a checkpoint, or those of its adapter alone, and the tensors that no model has."""
    keys = {
        key.removeprefix(prefix): key
        for key in state.shapes
        for prefix in (MODEL_PREFIX, BUFFER_PREFIX)
        if key.startswith(prefix)
    }
    added = added_of(keys)
    shapes = without_added({name: state.shapes[key] for name, key in keys.items()})
    base, drawn = _base_weights(described, state, shapes.keys() | added.keys())
    available = shapes | {name: tuple(tensor.shape) for name, tensor in without_added(base).items()}
    merged = MergedWeights(described, available, _adapter(state))

    def read(name: str) -> Tensor:
        return merged.merged(name, lambda one: base[one] if one in base else _read(state, keys[one]))

    if adapter:
        peft_type = (card_of(str(_group(state.facts.identity, "task").get("type"))) or Card()).peft_type
        buffers = {name for name, key in keys.items() if key.startswith(BUFFER_PREFIX)}  # those of the base
        # Weights without any part in the base, and those that the base lacks: PEFT must write them whole.
        own = {name for name in merged.shapes if base.keys().isdisjoint(merged.sources(name))} - buffers | drawn
        names = available.keys() | merged.shapes
        weights = [write_adapter(described, _origin_model(state), peft_type, names, own, read, folder, type_)]
    else:
        weights = plan_files(described, merged.shapes, type_).write(read, folder)
    # A frozen added module stands in no checkpoint, but in the base.
    write_added(added_of(base) | {name: _read(state, key) for name, key in added.items()}, folder, type_)
    return weights


def _verified_folder(
    state: SavedState, described: Any, folder: Path, opened: Opened, verification: Verification
) -> Certificate:
    """Compare a new folder with the model of its checkpoint, as another program opens both.

    Raises:
        UsageError: the recipe or its rows are missing.
        NotTheTrainedModelError: the folder holds another model.
    """
    recipe = state.facts.origin.get("recipe")
    if not isinstance(recipe, Mapping):
        raise UsageError(
            f"`--verify` needs the recipe of the training, but {state.folder / FACTS} has none; leave it out"
        )
    names = [name for key in state.shapes if is_added(name := key.removeprefix(MODEL_PREFIX))]
    added = {name: _read(state, f"{MODEL_PREFIX}{name}") for name in names}
    preparation = state.folder / MODEL_FOLDER
    return verify(folder, opened, verification, _trained_model(state, described), added, preparation, recipe)


def _opened(
    state: SavedState, described: Any, dtype: PrecisionName, adapter: bool, export_format: ExportFormat | None
) -> Opened:
    """Return how another program opens the new folder.

    Raises:
        UsageError: no other program computes the outputs of the training.
    """
    if export_format is not None:
        return Opened(export_format.program, dtype)
    if not adapter:
        return Opened((card_of(_task_type(state)) or Card()).program, dtype)
    origin = _origin_model(state)
    assert origin.name_or_path is not None, "it was checked"
    quantization: dict[str, Any] | None = None
    if any(is_added(key.removeprefix(MODEL_PREFIX)) for key in state.shapes):
        raise UsageError(
            "`--verify` with `--adapter` opens the folder with PEFT, which has no dense layers and no temperature of"
            " embeddings; leave one of them out"
        )
    if origin.quantization == "int8":
        raise UsageError(
            "`--verify` with `--adapter` compares logits of PEFT, but over `model.quantization` int8 other programs"
            " round the inputs of layers too; leave one of them out"
        )
    if origin.quantization is not None:
        adapted = copy.deepcopy(described)
        # On `meta`, adapters have shapes only, so any seed gives the same ones.
        adapt(adapted, origin, 0, [])
        layers = {name for name, module in described.named_modules() if isinstance(module, torch.nn.Linear)}
        # PEFT must leave exact the layers that the training left exact.
        whole = layers - {name.rpartition(".")[0] for name in quantized_in(adapted)}
        quantization = {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": origin.quantization == "nf4",
            "llm_int8_skip_modules": sorted(whole),
        }
    return Opened(Program("PEFT", ("peft",)), dtype, origin.name_or_path, origin.revision, quantization)


def _trained_model(state: SavedState, described: Any) -> Any:
    """Return the model of a checkpoint on the CPU, with its adapters apart from the weights; it has no added module.

    Raises:
        UsageError: the base of an adapter is missing.
    """
    quantized: Mapping[str, Mapping[str, Tensor]] = {}
    if _group(state.facts.identity, "model").get(FROZEN_WEIGHTS) is None:
        # Each tensor is copied from the checkpoint below, so none needs a first value.
        with no_init_weights():
            model = type(described)(described.config)
        model.tie_weights()  # which the flag above leaves out
    else:
        recipe, seed = _origin_model(state), int(state.facts.identity["training"]["seed"])
        model, drawn, quantized = build_base(described, recipe, seed)
        adapt(model, recipe, seed, drawn)
    tensors = {f"{MODEL_PREFIX}{name}": tensor for name, tensor in model.named_parameters()}
    tensors |= {f"{BUFFER_PREFIX}{name}": tensor for name, tensor in persistent_buffers(model).items()}
    with torch.no_grad():
        for name, parts in quantized.items():
            for part, tensor in parts.items():
                tensors[f"{MODEL_PREFIX}{name}.{part}"].copy_(tensor.view_as(tensors[f"{MODEL_PREFIX}{name}.{part}"]))
        for key in state.shapes:
            if key in tensors:
                tensors[key].copy_(_read(state, key))
    return model


def _require_adapter(state: SavedState) -> None:
    if not _group(state.facts.identity, "model").get("adapter"):
        raise UsageError(f"`--adapter` needs a run with `model.adapter`, but {state.folder} has none; leave it out")
    if _origin_model(state).name_or_path is None:
        raise UsageError(
            "`--adapter` needs a run with `model.name_or_path`, because the folder names its base, but the run has"
            " `model.config`; leave it out, which writes the merged model"
        )


def _task_type(state: SavedState) -> str:
    return str(_group(_group(state.facts.origin, "recipe"), "task").get("type", ""))


def _whole_recipe(state: SavedState) -> Recipe:
    with _reading(state, "its recipe"):
        return Recipe.model_validate(state.facts.origin["recipe"])


def _origin_model(state: SavedState) -> Model:
    with _reading(state, "`model` of its recipe"):
        return Model.model_validate(state.facts.origin["recipe"]["model"])


def _base_weights(described: Any, state: SavedState, saved: Collection[str]) -> tuple[dict[str, Tensor], set[str]]:
    """Return the frozen weights that a checkpoint leaves out, from their origin; none if it has all weights.

    The second result names those that are drawn from the seed, because the origin lacks them.

    Raises:
        UsageError: the origin is missing, or its weights are others than those of the training.
    """
    identity = state.facts.identity
    digest = _group(identity, "model").get(FROZEN_WEIGHTS)
    if digest is None:
        return {}, set()
    recipe = _origin_model(state)
    with _reading(state, "`training.seed`"):
        seed = int(identity["training"]["seed"])
    model, drawn, quantized = build_base(described, recipe, seed)
    # Only weights that the checkpoint lacks; the others would hide the trained values.
    base = {name: p.detach() for name, p in model.named_parameters() if name not in saved}
    # Before the quantisation, which replaces the names of weights by those of their parts.
    found_drawn = base.keys() & drawn
    if recipe.quantization is not None:
        adapted = copy.deepcopy(described)
        adapt(adapted, recipe, seed, drawn)
        base = quantized_base(adapted, base, quantized)
    whole = _whole_recipe(state)
    added = values_of(with_folder(build_task(whole.task), whole).added_module())
    base |= {name: value for name, value in added.items() if name not in saved}
    parts = [
        TensorPart(f"{MODEL_PREFIX}{name}", tuple(tensor.shape), (Box((0,) * tensor.dim(), tensor),))
        for name, tensor in base.items()
    ]
    # The hub's model may have changed since the training; merged with other weights, an adapter is wrong in silence.
    if (found := joined([own_digest(parts)])) != digest:
        raise UsageError(
            f"`model.name_or_path` of the run must hold the frozen weights of the training, but their digest is {found}"
            f" and should be {digest}; restore the weights of {recipe.name_or_path or 'model.config'}"
        )
    return base, found_drawn


def _adapter(state: SavedState) -> Adapter | None:
    adapter = _group(state.facts.identity, "model").get("adapter")
    if not adapter:
        return None
    with _reading(state, "`model.adapter`"):
        return Adapter.model_validate(adapter)


def _group(facts: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    group = facts.get(key)
    return group if isinstance(group, Mapping) else {}


@contextmanager
def _reading(state: SavedState, subject: str) -> Iterator[None]:
    """Refuse a checkpoint with facts that the block cannot read."""
    try:
        yield
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:  # pydantic's errors are `ValueError`s
        raise UsageError(
            f"`CHECKPOINT` must hold the facts of its training, but {subject} in {state.folder / FACTS} is missing or"
            " wrong; name a checkpoint that trainer saved"
        ) from error


def _free_place(folder: Path) -> Path:
    place = folder.resolve()
    if place.is_dir() and not any(place.iterdir()):
        return place
    if place.exists():
        what = "holds files" if place.is_dir() else "is a file"
        raise UsageError(f"`FOLDER` must be empty or missing, but {place} {what}; name another, or remove it")
    return place


def _open(checkpoint: Path) -> tuple[SavedState, list[str]]:
    """Return the verified checkpoint, and notes on those that were skipped."""
    store = CheckpointStore(checkpoint, keep=1)
    if (checkpoint / FACTS).exists() or not store.folder.is_dir():
        return _verified(checkpoint), []
    notes: list[str] = []
    # The newest whole checkpoint: the last one may be damaged or half written.
    for step in reversed(store.steps()):
        try:
            return _verified(store.path(step)), notes
        except UsageError as error:
            notes.append(f"skipped a checkpoint: {error}")
    problems = "".join(f"; {note}" for note in notes)
    raise UsageError(
        f"`CHECKPOINT` must hold a whole checkpoint, but {checkpoint} holds none{problems}. Name another run, or train"
        " this one until it has saved"
    )


def _verified(folder: Path) -> SavedState:
    if not folder.is_dir() or not (folder / FACTS).exists():
        raise UsageError(
            "`CHECKPOINT` must be the folder of a checkpoint, such as runs/NAME/checkpoints/step-00000120, or of a run,"
            f" but {folder} {'is neither' if folder.exists() else 'does not exist'}; name one of these"
        )
    try:
        return open_verified(folder)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"`CHECKPOINT` must be whole, but {folder} is not: {error}; name another of its run, or the run's folder to"
            " take the newest that is"
        ) from error


def _read(state: SavedState, key: str) -> Tensor:
    try:
        return state.read(key)
    except (OSError, ValueError, SafetensorError) as error:
        raise UsageError(
            f"`CHECKPOINT` must stay as it is while it is read, but {key} of {state.folder} can no longer be read:"
            f" {error}; export again, or from another"
        ) from error


def _beside_weights(folder: Path, names: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the model's configuration, and the names of the files to copy, its own included."""
    start = f"{MODEL_FOLDER}/"
    beside = [name.removeprefix(start) for name in names if name.startswith(start)]
    for name in beside:
        if Path(name).name.startswith(_NEVER_BEGINS) or name.endswith(_NEVER_ENDS):
            raise UsageError(
                f"`CHECKPOINT` must hold only configurations and files that prepare rows in {MODEL_FOLDER}/, but"
                f" {folder} has {name} there; name a checkpoint that trainer saved"
            )
    if CONFIG_NAME not in beside:
        raise UsageError(
            f"`CHECKPOINT` must hold the model's configuration, but {folder} has no {MODEL_FOLDER}/{CONFIG_NAME}; name"
            " a checkpoint that trainer saved"
        )
    try:
        config = json.loads((folder / MODEL_FOLDER / CONFIG_NAME).read_text(encoding="utf-8"))
        if isinstance(config, dict):
            return config, beside
        problem = "it is no object"
    except (ValueError, RecursionError) as error:
        problem = str(error)
    raise UsageError(
        f"`CHECKPOINT` must hold the model's configuration, but {folder / MODEL_FOLDER / CONFIG_NAME} cannot be read:"
        f" {problem}; name another checkpoint"
    )


def _with_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return the configuration with this type of weights, in the models inside it too."""
    return {
        key: _with_dtype(value, dtype) if isinstance(value, Mapping) and "model_type" in value else value
        for key, value in config.items()
    } | {"dtype": dtype}
