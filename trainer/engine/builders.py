"""The construction of the engine of a plan, by the builder of its strategy (`recipe/strategies.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from trainer.base.errors import UsageError
from trainer.base.extensions import resolved
from trainer.engine.engine import Engine
from trainer.models.added_loss import AddedLoss
from trainer.models.families.table import CHECKPOINTING, COMPILE, SHARDING, layers_of
from trainer.models.place import PlacedModel
from trainer.parallel.mesh import ParallelMesh
from trainer.recipe.plan import RunPlan
from trainer.recipe.registered import asked_for
from trainer.tasks.task import Task

if TYPE_CHECKING:
    from trainer.models.chunked_head import Columns

EngineBuilder = Callable[[PlacedModel, Task, ParallelMesh, RunPlan, int], Engine]
"""A builder of the engine of a strategy, for a model without pipeline stages."""


def build_engine(
    built: Sequence[PlacedModel],
    task: Task,
    mesh: ParallelMesh,
    plan: RunPlan,
    total_steps: int,
    added_loss: AddedLoss | None = None,
) -> Engine:
    """Place the model over the mesh by the recipe's strategy, and return its engine.

    The task gets the split of the logits over the vocabulary, if there is one.

    Args:
        total_steps: the last step of the learning rate's schedule.
        added_loss: the loss of a second model; None on ranks without the last stage, or if there is none.
    """
    columns = check_built(built, task, plan)
    built = [replace(part, added_loss=added_loss) for part in built]
    cut = next((part.vocabulary for part in built if part.vocabulary), None)
    task = task.for_vocabulary(cut)
    if columns is not None:
        from trainer.models.chunked_head import chunk_head

        # The loss comes from the task that knows the cut, and before `for_token_scores` replaces it.
        heads = [chunk_head(part.model, columns, cut, task.token_scores) for part in built]
        built = [replace(part, head=head) for part, head in zip(built, heads, strict=True)]
        # The head now returns scores of tokens in place of logits, so the task must read those.
        task = task.for_token_scores()
    if plan.pipeline is not None:
        from trainer.engine.pipelined import build_pipelined

        return build_pipelined(built, task, mesh, plan, total_steps)
    # Without a pipeline, a rank holds exactly one model.
    (whole,) = built
    build: EngineBuilder = resolved(plan.strategy.builder)
    return build(whole, task, mesh, plan, total_steps)


def check_built(built: Sequence[PlacedModel], task: Task, plan: RunPlan) -> Columns | None:
    """Refuse placed models, perhaps on `meta`, that a plan cannot train; return the columns of `vocabulary_chunk`.

    Raises:
        UsageError: the task cannot generate texts in parts, the layers of the model are unknown although a key needs
            them, or the head must return all logits although the columns are a number.
    """
    refuse_generation_in_parts(task, plan)
    recipe = plan.recipe
    needs = {
        CHECKPOINTING: recipe.activation_checkpointing != "none",
        COMPILE: recipe.compile,
        SHARDING: plan.strategy.cuts_parameters and not plan.strategy.package,
        f"`optimizer.name` {recipe.optimizer.name}": recipe.optimizer.needs_layers,
    }
    for key, is_needed in needs.items():
        if is_needed:
            layers_of(built[0].model, key)
    return _vocabulary_chunk(built, task, plan)


def _vocabulary_chunk(built: Sequence[PlacedModel], task: Task, plan: RunPlan) -> Columns | None:
    """Return `task.vocabulary_chunk`; None if it is no number, and a part of the training needs all logits."""
    columns = task.vocabulary_chunk
    if columns is None:
        return None
    from trainer.models.chunked_head import refuse_blocks, why_whole

    needs_all = plan.strategy.single_process or asked_for("second_model", plan.recipe)
    # A text lets the trainer choose. `dp` copies modules, but the `forward` of a copied head would call the first one.
    if isinstance(columns, str) and needs_all:
        return None
    why = next((why for part in built if (why := why_whole(part.model))), None)
    # A number is the user's wish, which is refused and never dropped in silence; a text allows whole logits.
    if why is not None and not isinstance(columns, str):
        raise refuse_blocks(why)
    return columns if why is None else None


def refuse_generation_in_parts(task: Task, plan: RunPlan) -> None:
    """Refuse a task that generates texts over pipeline stages or context ranks, or without padding."""
    if task.generates and plan.recipe.data.padding_free:
        raise UsageError("`data.padding_free` must be false to generate texts token by token, but is true; remove it")
    parallel = plan.recipe.parallel
    for key, degree, needed in (
        ("parallel.pipeline.stages", parallel.pipeline.stages, "a rank needs the whole model"),
        ("parallel.context", parallel.context, "a rank needs the keys and values of all earlier positions"),
    ):
        if task.generates and degree > 1:
            raise UsageError(f"`{key}` must be 1 to generate texts, for which {needed}, but is {degree}; add {key}=1")
