"""From the name of a strategy to its engine: one row for each row of `recipe/strategies.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trainer.engine.engine import Engine
from trainer.engine.native import build_native
from trainer.engine.pipelined import build_pipelined
from trainer.engine.replicated import build_replicated
from trainer.engine.zero import build_zero, partitioned_loading
from trainer.models.building import BuiltModel
from trainer.models.cutting import ModelCut, model_cuts
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.placement import PIPELINE_AXIS
from trainer.recipe.plan import RunPlan
from trainer.tasks.task import Task

EngineBuilder = Callable[[BuiltModel, Task, ParallelMesh, RunPlan, int], Engine]
"""Of a strategy, for a model that no stages were cut of."""

BUILDERS: dict[str, EngineBuilder] = {
    "ddp": build_native,
    "fsdp": build_native,
    "hsdp": build_native,
    "zero1": build_zero,
    "zero2": build_zero,
    "zero3": build_zero,
    "dp": build_replicated,
}


def build_engine(
    built: Sequence[BuiltModel], task: Task, mesh: ParallelMesh, plan: RunPlan, total_steps: int
) -> Engine:
    """Places the model over the mesh by the recipe's strategy and gives the engine that trains it.

    The task learns here, once for all engines, whether the logits that it will be given are cut over the vocabulary.

    Args:
        built: the model, or this rank's pipeline stages of it.
        task: gives the loss.
        mesh: the ranks.
        plan: what was asked for.
        total_steps: where the schedule of the learning rate ends.
    """
    task = task.for_vocabulary(next((part.vocabulary for part in built if part.vocabulary), None))
    if plan.pipeline is not None:
        return build_pipelined(built, task, mesh, plan, total_steps)
    (whole,) = built
    return BUILDERS[plan.recipe.parallel.strategy](whole, task, mesh, plan, total_steps)


def planned_cuts(plan: RunPlan, mesh: ParallelMesh) -> list[ModelCut | None]:
    """How this rank's models are to be cut while they are built: one for each of its pipeline stages, or the whole."""
    parallel, pipeline = plan.recipe.parallel, plan.pipeline
    stages = pipeline.stages_of(mesh.index(PIPELINE_AXIS)) if pipeline else (0,)
    num_stages = pipeline.num_stages if pipeline else 1
    return model_cuts(mesh, parallel.sequence, stages, num_stages, parallel.pipeline.split)


__all__ = ["BUILDERS", "build_engine", "partitioned_loading", "planned_cuts"]
