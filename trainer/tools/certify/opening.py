"""The model of a checkpoint as it was trained, and how another program opens the folder that is exported from it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.initialization import no_init_weights

from trainer.base.errors import UsageError
from trainer.engine.precision import PrecisionName
from trainer.engine.state import BUFFER_PREFIX, MODEL_PREFIX
from trainer.models.added import is_added
from trainer.models.freezing import adapt
from trainer.models.registered_forms import form_of
from trainer.models.statistics import persistent_buffers
from trainer.models.weight_form import PartsByName
from trainer.tasks.exported import ExportFormat, Program
from trainer.use.export.base_model import build_base
from trainer.use.export.checkpoint_model import CheckpointModel


@dataclass(frozen=True)
class Opened:
    """How another program opens the exported folder.

    `dtype` is the type of the weights. `base` and `revision` are the model below an adapter, and `quantization` is its
    `quantization_config` in transformers.
    """

    program: Program
    dtype: str
    base: str | None = None
    revision: str | None = None
    quantization: Mapping[str, Any] | None = None


def opened_by(
    model: CheckpointModel, dtype: PrecisionName, adapter: bool, export_format: ExportFormat | None
) -> Opened:
    """Return how another program opens the new folder.

    Raises:
        UsageError: no other program computes the outputs of the training.
    """
    if export_format is not None:
        return Opened(export_format.program, dtype)
    if not adapter:
        return Opened(model.card.program, dtype)
    origin, described = model.recipe.model, model.described
    assert origin.name_or_path is not None, "it was checked"
    quantization: Mapping[str, Any] | None = None
    if any(is_added(key.removeprefix(MODEL_PREFIX)) for key in model.state.shapes):
        raise UsageError(
            "`--verify` with `--adapter` opens the folder with PEFT, which has no dense layers and no temperature of"
            " embeddings; leave one of them out"
        )
    if (form := form_of(origin)) is not None:
        adapted = copy.deepcopy(described)
        # On `meta`, adapters have shapes only, so any seed gives the same ones.
        adapt(adapted, origin, 0, [])
        quantization = form.peft_config(described, adapted)
    return Opened(Program("PEFT", ("peft",)), dtype, origin.name_or_path, origin.revision, quantization)


def trained_model(checkpoint: CheckpointModel) -> Any:
    """Return the model of a checkpoint on the CPU, with its adapters apart from the weights; it has no added module.

    Raises:
        UsageError: the base of an adapter is missing.
    """
    encoded: PartsByName = {}
    described = checkpoint.described
    if checkpoint.frozen_digest is None:
        # Each tensor is copied from the checkpoint below, so none needs a first value.
        with no_init_weights():
            model = type(described)(described.config)
        model.tie_weights()  # which the flag above leaves out
    else:
        recipe, seed = checkpoint.recipe.model, checkpoint.seed
        model, drawn, encoded = build_base(described, recipe, seed)
        adapt(model, recipe, seed, drawn)
    tensors = {f"{MODEL_PREFIX}{name}": tensor for name, tensor in model.named_parameters()}
    tensors |= {f"{BUFFER_PREFIX}{name}": tensor for name, tensor in persistent_buffers(model).items()}
    with torch.no_grad():
        for name, parts in encoded.items():
            for part, tensor in parts.items():
                tensors[f"{MODEL_PREFIX}{name}.{part}"].copy_(tensor.view_as(tensors[f"{MODEL_PREFIX}{name}.{part}"]))
        for key in checkpoint.state.shapes:
            if key in tensors:
                tensors[key].copy_(checkpoint.read(key))
    return model
