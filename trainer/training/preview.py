"""Checks a recipe's model against its layout before a run: the model is built on the meta device."""

from __future__ import annotations

from trainer.models.building import build_on_meta
from trainer.models.stages import split_stages, stage_sizes
from trainer.models.tensor import check_split
from trainer.recipe.drawing import StageContents
from trainer.recipe.plan import RunPlan
from trainer.tasks.classes import NamedClasses
from trainer.tasks.registry import build_task


def preview_stages(plan: RunPlan) -> list[StageContents] | None:
    """Return the contents of each pipeline stage of a plan; None without a pipeline.

    Raises:
        UsageError: there is no such model, or it cannot be cut over the plan's tensor ranks or stages.
    """
    recipe, parallel = plan.recipe, plan.recipe.parallel
    task = build_task(recipe.task)
    # Without `task.labels` the data decides the classes; transformers' default number stands in.
    unknown = isinstance(task, NamedClasses) and task.class_names is None
    options = {} if unknown else task.model_options()
    model = build_on_meta(recipe.model, recipe.training, task.auto_class_name, options)
    if parallel.tensor > 1:
        check_split(model, parallel.tensor, parallel.sequence)
    if plan.pipeline is None:
        return None
    split = split_stages(model, plan.pipeline.num_stages, parallel.pipeline.split, parallel.pipeline.schedule)
    return [StageContents(split.layers_of(stage), size) for stage, size in enumerate(stage_sizes(model, split))]
