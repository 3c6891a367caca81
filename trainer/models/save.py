"""Write a trained model as a Hugging Face folder, by all ranks at once; no rank ever holds the whole model."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from trainer.base.errors import TrainerError
from trainer.models.added import is_added, without_added, write_added
from trainer.models.merged_weights import MergedWeights
from trainer.models.statistics import persistent_buffers
from trainer.models.weight_files import WeightFile, WeightFiles, described_model, plan_files, transformers_class
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.shards.gathering import WholeTensors
from trainer.recipe.schema import Adapter


def save_configuration(model: nn.Module, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write the files, except the weights, from which transformers rebuilds the model with weights of type `dtype`.

    Raises:
        OSError: a file cannot be written.
    """
    described: Any = model
    _saved_config(model, dtype).save_pretrained(folder)
    if described.can_generate():
        # Its own method refuses settings of a checkpoint that do not combine, as soon as one of them has changed.
        described.generation_config.to_json_file(folder / GENERATION_CONFIG_NAME, keys_to_pop=["compile_config"])


def _saved_config(model: Any, dtype: torch.dtype) -> Any:
    # A copy: the best model is exported during the training, which goes on with this configuration.
    config = copy.deepcopy(model.config)
    config.architectures = [transformers_class(model).__name__]
    config.dtype = dtype
    return config


def files_of_weights(model: nn.Module, adapter: Adapter | None, dtype: torch.dtype = torch.float32) -> WeightFiles:
    """Return the files that `save_model` writes for a whole model, perhaps on `meta`."""
    weights = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    buffers = {name: tuple(buffer.shape) for name, buffer in persistent_buffers(model).items()}
    described = json.loads(_saved_config(model, dtype).to_json_string())
    return _plan_weights(described, without_added(weights) | buffers, adapter)[1]


def save_model(
    model: nn.Module,
    folder: Path,
    tensors: WholeTensors,
    mesh: ParallelMesh,
    adapter: Adapter | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write a Hugging Face folder with safetensors and configuration; all ranks must call it.

    The ranks take turns with the files. Each collects the tensors of one file, and writes it while the others collect
    theirs.

    Args:
        folder: the folder to write to, which all ranks share; it is created if it does not exist.
        tensors: all tensors of the whole model; tied tensors appear once.
        adapter: the recipe's adapter, which is merged into the weights; None without one.

    Raises:
        TrainerError: a file cannot be written; on every rank.
    """

    def begin() -> dict[str, Any]:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            save_configuration(model, folder, dtype)
            described: dict[str, Any] = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
        except OSError as error:
            raise _cannot_write(folder, error) from error
        return described

    merged, planned = _plan_weights(mesh.on_rank_zero(begin), without_added(tensors.shapes), adapter)

    def write(file: WeightFile, parts: Mapping[str, Tensor]) -> Path:
        folder.mkdir(parents=True, exist_ok=True)  # another machine may not see it yet
        return file.write(lambda name: merged.merged(name, parts.__getitem__), folder)

    writing: Future[Path] | None = None
    error: Exception | None = None
    # One thread: the disk works while this rank joins the collectives of the next files.
    thread = ThreadPoolExecutor(1)
    try:
        for number, file in enumerate(planned.files):
            writer = writer_of(number, mesh.world_size)
            if writer == mesh.rank:
                # The rank goes on after an error of its disk: the others wait for it in the collectives.
                error = error or _error_of(writing)  # before the tensors of the next file take memory
            parts = _collected(tensors, chain.from_iterable(map(merged.sources, file.sources)), writer)
            if writer == mesh.rank:
                writing = thread.submit(write, file, parts)
        error = _error_of(writing) or error
    finally:
        thread.shutdown(wait=False)  # an error of a collective does not wait for the disk
    added = _collected(tensors, filter(is_added, tensors.shapes), 0)
    if error is None and mesh.rank == 0:
        try:
            planned.write_index(folder)
            write_added(added, folder, dtype)
        except (OSError, SafetensorError) as raised:
            error = raised
    # All ranks learn of an error, so all raise.
    failures = [text for text in mesh.all_gather(str(error) if error else None) if text]
    if failures:
        raise _cannot_write(folder, failures[0]) from error


def _collected(tensors: WholeTensors, names: Iterable[str], rank: int) -> dict[str, Tensor]:
    """Return whole tensors on one rank, and none on the others; all ranks must call it with the same names."""
    # Every rank, in the same order: each `collect` is a collective.
    collected = {name: tensors.collect(name, rank) for name in dict.fromkeys(names)}
    return {name: tensor for name, tensor in collected.items() if tensor is not None}


def _plan_weights(
    described: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], adapter: Adapter | None
) -> tuple[MergedWeights, WeightFiles]:
    """Return the weights of a `config.json` and their files, from the shapes of the tensors of a trained model."""
    model = described_model(described)
    merged = MergedWeights(model, shapes, adapter)
    return merged, plan_files(model, merged.shapes, getattr(torch, described["dtype"]))


def writer_of(number: int, world_size: int) -> int:
    return number % world_size


def _error_of(writing: Future[Path] | None) -> Exception | None:
    """Wait for a file, and return the error of the disk that prevented it; any other error is raised."""
    try:
        if writing is not None:
            writing.result()
    except (OSError, SafetensorError) as error:
        return error.with_traceback(None)  # it would keep the tensors of the file
    return None


def _cannot_write(folder: Path, reason: object) -> TrainerError:
    return TrainerError(f"the model could not be written to {folder}: {reason}")
