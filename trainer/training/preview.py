"""The contents of pipeline stages before a run; the model is built without memory."""

from __future__ import annotations

from trainer.models.building import build_on_meta
from trainer.models.stages import split_stages, stage_sizes
from trainer.recipe.drawing import StageContents
from trainer.recipe.plan import RunPlan
from trainer.tasks.classes import RowClasses
from trainer.tasks.registry import build_task


def preview_stages(plan: RunPlan) -> list[StageContents]:
    """Return the contents of each stage of a plan with a pipeline.

    Raises:
        UsageError: The model cannot be found, or cannot be cut like this.
    """
    assert plan.pipeline is not None, "there are no stages"
    recipe = plan.recipe
    task = build_task(recipe.task)
    # Without `task.labels` the data decides the classes; transformers' default number stands in.
    unknown = isinstance(task, RowClasses) and task.class_names is None
    options = {} if unknown else task.model_options()
    model = build_on_meta(recipe.model, recipe.training, task.auto_class_name, options)
    split = split_stages(model, plan.pipeline.num_stages, recipe.parallel.pipeline.split)
    return [StageContents(split.layers_of(stage), size) for stage, size in enumerate(stage_sizes(model, split))]
