"""Batch normalisation with fixed running statistics.

In training, batch normalisation (Ioffe & Szegedy 2015, arXiv:1502.03167) uses the mean and variance of the rows of a
microbatch. Results would then depend on the microbatch size and the number of ranks. This module uses the model's
initial running statistics, in training and in evaluation. Scale and shift are learned.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.base.errors import UsageError
from trainer.parallel.mesh import ParallelMesh


class _FixedStatistics(_BatchNorm):
    """A batch normalisation that is never in training mode."""

    def train(self, mode: bool = True) -> _FixedStatistics:
        # `train()` of a model calls that of each module, so every call must end here.
        super().train(False)
        return self


_FIXED: dict[type[nn.Module], type[_BatchNorm]] = {
    base: type(f"Fixed{base.__name__}", (_FixedStatistics, base), {})
    for base in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
}


def fix_statistics(model: nn.Module) -> list[str]:
    """Make every batch normalisation of a model use its running statistics, and fix these.

    Returns:
        Notes for the user; empty without batch normalisation.

    Raises:
        UsageError: a batch normalisation has no running statistics, or is of an unknown class.
    """
    count = 0
    for name, module in model.named_modules():
        if not isinstance(module, _BatchNorm):
            continue
        fixed = _FIXED.get(type(module))
        if fixed is None or module.running_mean is None:
            raise UsageError(
                f"{name} is a {type(module).__name__} that normalises by the rows of a microbatch, so the training"
                " would depend on the layout; use a model with running statistics of batch normalisation"
            )
        module.__class__ = fixed  # the same parameters and buffers, under the same names
        module.eval()
        count += 1
    if not count:
        return []
    return [
        f"the running statistics of {count} batch normalisations stay as they are before the training: those"
        " of a microbatch would depend on the layout"
    ]


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the persistent buffers of a model by name, such as running statistics."""
    return {
        name: buffer
        for path, module in model.named_modules()
        for name, buffer in module.named_buffers(path, recurse=False)
        if name.rpartition(".")[2] not in module._non_persistent_buffers_set
    }


def buffers_hash(models: Iterable[nn.Module], mesh: ParallelMesh) -> str | None:
    """Return a hash of the persistent buffers, which no checkpoint of a run holds, or None without buffers.

    The hash is the same under every layout. All ranks must call this function.
    """
    # fp64 holds every value of the other types exactly, so the hash does not depend on the type.
    digests = {
        name: hashlib.sha256(buffer.detach().cpu().to(torch.float64).numpy().tobytes()).hexdigest()
        for model in models
        for name, buffer in persistent_buffers(model).items()
    }
    if mesh.size("pp") > 1:  # each rank has the buffers of its own stages only
        gathered = mesh.gather(digests)
        digests = mesh.share({name: digest for part in gathered or [] for name, digest in part.items()})
    return hashlib.sha256(json.dumps(sorted(digests.items())).encode()).hexdigest() if digests else None
