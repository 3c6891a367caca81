"""The reference of a loss: outputs of the model at the start of a training, computed once for each row and kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.base.distribution import versions
from trainer.data.cache import CorruptEntryError, entry_key, open_entry, open_or_write
from trainer.data.loader import EvalLoader
from trainer.data.split import EncodedSplit
from trainer.engine.engine import Engine
from trainer.engine.precision import weights_dtype
from trainer.engine.state import OPTIMIZER_PREFIX
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.microbatch import Microbatch
from trainer.parallel.shards.digest import joined, own_digest
from trainer.ranks.environment import cache_folder
from trainer.recipe.schema import Recipe
from trainer.training.run_data import PreparedData
from trainer.training.whole_split import gathered_rows

REFERENCE = "reference"
"""The column of the reference."""


def with_reference(
    recipe: Recipe, data: PreparedData, engine: Engine, mesh: ParallelMesh, model: Mapping[str, Any]
) -> PreparedData:
    """Return the data with the column `reference`, if they lack it. All ranks must call it.

    The model computes it as in an evaluation, in the layout of the training. A later run with the same model and its
    configuration, rows, precision, source code and versions of packages reads it from the cache.

    Args:
        engine: the engine, before the first step and before a checkpoint is loaded.
        model: the facts of the model beside its weights.

    Raises:
        TrainerError: the cache cannot be written.
    """
    if REFERENCE in data.train.arrays:
        return data
    # The digest of the weights is the key, so that another path to equal weights finds the cache.
    state = engine.state()
    parts = (part for part in chain(state.parts, state.frozen()) if not part.name.startswith(OPTIMIZER_PREFIX))
    weights = joined(mesh.all_gather(own_digest(parts)))
    facts = {
        "weights": weights,
        "model": dict(model),
        "numbers": [recipe.precision, str(weights_dtype(recipe)), recipe.tf32, mesh.device.type],
    }
    cache = Path(recipe.data.cache) if recipe.data.cache else cache_folder()

    def completed(split: EncodedSplit) -> EncodedSplit:
        key = f"{REFERENCE}-{entry_key(data.task, tuple(versions()), **facts, rows=split.content_hash)}"
        # Rank 0 alone reads, and all ranks get its answer: caches of hosts may differ, and `_compute` is a collective.
        known: Tensor | None = mesh.share(_read(cache / key) if mesh.rank == 0 else None)
        if known is None:
            computed = _compute(recipe, data, split, engine, mesh)
            mesh.on_rank_zero(lambda: None if computed is None else _write(cache, key, computed))
            known = mesh.share(computed)
        assert known is not None, "rank 0 has it"
        return split.with_array(REFERENCE, known.numpy())

    validation = None if data.validation is None else completed(data.validation)
    return replace(data, train=completed(data.train), validation=validation)


def _compute(
    recipe: Recipe, data: PreparedData, split: EncodedSplit, engine: Engine, mesh: ParallelMesh
) -> Tensor | None:
    """Return the reference of each row on rank 0; None on other ranks."""
    batching, size = data.preparation.batching, recipe.evaluation.batch_size
    loader = EvalLoader(split, size, mesh.index("dp"), mesh.size("dp"), batching)

    def begin(microbatch: Microbatch) -> Callable[[], Mapping[str, Tensor]]:
        read = engine.begin_eval(microbatch)
        return lambda: read().predictions

    found = gathered_rows(loader, begin, mesh, len(split))
    return None if found is None else found["scores"][..., 0].float()  # the log-probabilities of `Answers`


def _read(entry: Path) -> Tensor | None:
    """Return the values of an entry; None if there is none, or it is damaged."""
    try:
        # A copy, because entries are mapped for reading only, and torch does not support arrays that cannot be written.
        return torch.from_numpy(open_entry(entry, verify=True).arrays[REFERENCE].copy())
    except (FileNotFoundError, CorruptEntryError):
        return None


def _write(cache: Path, key: str, values: Tensor) -> None:
    """Write values, whole or not at all."""
    open_or_write(cache, key, lambda entry: entry.add({REFERENCE: list(values.numpy())}))
