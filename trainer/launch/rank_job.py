"""The job of a rank, and the devices and threads that it uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from trainer.base.collector import importing
from trainer.ranks.environment import LaunchEnvironment, threads_per_rank

if TYPE_CHECKING:
    from trainer.recipe.reading.loading import ResolvedRecipe

Job: TypeAlias = "Callable[[ResolvedRecipe, LaunchEnvironment], int]"
"""The work of a rank, which returns its exit code; picklable."""


def num_gpus() -> int:
    with importing():
        import torch

    return torch.cuda.device_count()


def set_threads(environment: LaunchEnvironment) -> None:
    """Share the cores of this machine among its ranks."""
    with importing():
        import torch

    if environment.world_size > 1 and (threads := threads_per_rank(environment)) is not None:
        torch.set_num_threads(threads)
