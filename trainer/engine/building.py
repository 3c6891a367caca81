"""From the name of a strategy to its engine: one row for each row of `recipe/strategies.py`."""

from __future__ import annotations

from collections.abc import Callable

from trainer.engine.engine import Engine
from trainer.engine.native import build_native
from trainer.engine.replicated import build_replicated
from trainer.engine.zero import build_zero, partitioned_loading
from trainer.models.building import BuiltModel
from trainer.parallel.mesh import ParallelMesh
from trainer.recipe.plan import RunPlan
from trainer.tasks.task import Task

EngineBuilder = Callable[[BuiltModel, Task, ParallelMesh, RunPlan, int], Engine]

BUILDERS: dict[str, EngineBuilder] = {
    "ddp": build_native,
    "fsdp": build_native,
    "hsdp": build_native,
    "zero1": build_zero,
    "zero2": build_zero,
    "zero3": build_zero,
    "dp": build_replicated,
}


def build_engine(built: BuiltModel, task: Task, mesh: ParallelMesh, plan: RunPlan, total_steps: int) -> Engine:
    """Places the model over the mesh by the recipe's strategy and gives the engine that trains it.

    The task learns here, once for all engines, whether the logits that it will be given are cut over the vocabulary.
    """
    task = task.for_vocabulary(built.vocabulary)
    return BUILDERS[plan.recipe.parallel.strategy](built, task, mesh, plan, total_steps)


__all__ = ["BUILDERS", "build_engine", "partitioned_loading"]
