"""`trainer export`: from a checkpoint to a Hugging Face folder, on one machine.

The checkpoint holds the weights, the configuration and the tokenizer.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from trainer.base.disk import UNFINISHED, remove
from trainer.base.errors import TrainerError, UsageError
from trainer.base.extensions import load, registered, resolved
from trainer.checkpoint.format import FACTS, MODEL_FOLDER
from trainer.engine.precision import COMPUTE_DTYPES, PrecisionName
from trainer.engine.state import BUFFER_PREFIX, MODEL_PREFIX
from trainer.models.added import added_of, without_added, write_added
from trainer.models.merged_weights import MergedWeights
from trainer.models.weight_files import UnknownModelError, plan_files
from trainer.tasks.exported import ExportFormat
from trainer.training.export_check import Certificate, ExportCheck
from trainer.training.model_card import CARD_NAME, complete_folder
from trainer.use.export.checkpoint_model import CheckpointModel, open_checkpoint
from trainer.use.export.peft_folder import card_form, write_adapter
from trainer.use.export.refused import require_not_refused

SAFETENSORS = "safetensors"

# Copied files are not checked here, so weights, pickles and code are refused by name.
_NEVER_BEGINS = ("model.", "model-", "pytorch_model", "adapter_")
_NEVER_ENDS = (".bin", ".ckpt", ".h5", ".msgpack", ".pickle", ".pkl", ".pt", ".pth", ".py", ".safetensors")


class Verification(Protocol):
    """A request to compare the new folder with the model of the checkpoint."""

    def check(
        self, model: CheckpointModel, dtype: PrecisionName, adapter: bool, export_format: ExportFormat | None
    ) -> ExportCheck:
        """Return the comparison; called before the weights are written, so that a refusal costs no time.

        Raises:
            UsageError: no other program computes the outputs of the training.
        """


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
    model, notes = open_checkpoint(checkpoint)
    state = model.state
    if verification is None:
        require_not_refused(state.folder)
    beside, config = _beside_weights(model), model.config
    if adapter:
        _require_adapter(model)
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
            shutil.copyfile(model.preparation / name, temporary / name)
        type_ = COMPUTE_DTYPES.get(dtype, torch.float32)
        _write_dtype(config, type_, temporary)
        check = verification.check(model, dtype, adapter, export_format) if verification else None
        weights = _write_weights(model, temporary, type_, adapter)
        if export_format is not None:
            recipe = model.recipe if model.task_type else None
            weights = [export_format.convert(temporary, type(model.described), recipe)]
        certificate = check.compare(temporary) if check else None
        form = export_format.card_form(model.card) if export_format else card_form(temporary) if adapter else None
        complete_folder(temporary, place, state.facts.origin, state.facts.progress, certificate, form)
    except UnknownModelError as error:
        raise UsageError(
            f"`CHECKPOINT` must hold a model of transformers, but {model.preparation / CONFIG_NAME} describes"
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
    form: ExportFormat = resolved(formats[name])()
    return form


def _write_dtype(config: dict[str, Any], type_: torch.dtype, folder: Path) -> None:
    """Name the type of the weights in the configuration of a new folder, as transformers writes it."""
    typed = _with_dtype(config, str(type_).removeprefix("torch."))
    if typed != config:
        text = json.dumps(typed, indent=2, sort_keys=True) + "\n"
        (folder / CONFIG_NAME).write_text(text, encoding="utf-8")


def _write_weights(model: CheckpointModel, folder: Path, type_: torch.dtype, adapter: bool) -> Sequence[Path]:
    """Write the weights of a checkpoint, or those of its adapter alone, and the tensors that no model has."""
    state, described = model.state, model.described
    keys = {
        key.removeprefix(prefix): key
        for key in state.shapes
        for prefix in (MODEL_PREFIX, BUFFER_PREFIX)
        if key.startswith(prefix)
    }
    added = added_of(keys)
    shapes = without_added({name: state.shapes[key] for name, key in keys.items()})
    base, drawn = model.base_weights(shapes.keys() | added.keys())
    available = shapes | {name: tuple(tensor.shape) for name, tensor in without_added(base).items()}
    merged = MergedWeights(described, available, model.adapter)

    def read(name: str) -> Tensor:
        return merged.merged(name, lambda source: base[source] if source in base else model.read(keys[source]))

    if adapter:
        buffers = {name for name, key in keys.items() if key.startswith(BUFFER_PREFIX)}  # those of the base
        # Weights without any part in the base, and those that the base lacks: PEFT must write them whole.
        lacking = {name for name in merged.shapes if base.keys().isdisjoint(merged.sources(name))} - buffers | drawn
        names = available.keys() | merged.shapes
        origin, peft_type = model.recipe.model, model.card.peft_type
        weights = [write_adapter(described, origin, peft_type, names, lacking, read, folder, type_)]
    else:
        weights = plan_files(described, merged.shapes, type_).write(read, folder)
    # A frozen added module stands in no checkpoint, but in the base.
    write_added(added_of(base) | {name: model.read(key) for name, key in added.items()}, folder, type_)
    return weights


def _require_adapter(model: CheckpointModel) -> None:
    if model.adapter is None:
        folder = model.state.folder
        raise UsageError(f"`--adapter` needs a run with `model.adapter`, but {folder} has none; leave it out")
    if model.recipe.model.name_or_path is None:
        raise UsageError(
            "`--adapter` needs a run with `model.name_or_path`, because the folder names its base, but the run has"
            " `model.config`; leave it out, which writes the merged model"
        )


def _free_place(folder: Path) -> Path:
    place = folder.resolve()
    if place.is_dir() and not any(place.iterdir()):
        return place
    if place.exists():
        what = "holds files" if place.is_dir() else "is a file"
        raise UsageError(f"`FOLDER` must be empty or missing, but {place} {what}; name another, or remove it")
    return place


def _beside_weights(model: CheckpointModel) -> list[str]:
    """Return the names of the files to copy, that of the configuration included."""
    start, folder = f"{MODEL_FOLDER}/", model.state.folder
    beside = [name.removeprefix(start) for name in model.state.file_names if name.startswith(start)]
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
    return beside


def _with_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return the configuration with this type of weights, in the models inside it too."""
    return {
        key: _with_dtype(value, dtype) if isinstance(value, Mapping) and "model_type" in value else value
        for key, value in config.items()
    } | {"dtype": dtype}
