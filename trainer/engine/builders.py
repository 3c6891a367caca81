"""The construction of the engine of a plan, by the builder of its strategy (`recipe/strategies.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, Self

import torch
from torch import nn

from trainer.base.extensions import resolved
from trainer.engine.engine import Engine
from trainer.models.added_loss import AddedLoss
from trainer.models.families.table import CHECKPOINTING, COMPILE, SHARDING, layers_of
from trainer.models.place import PlacedModel
from trainer.parallel.mesh import ParallelMesh
from trainer.recipe.plan import RunPlan
from trainer.recipe.registered import all_of
from trainer.tasks.task import Task

if TYPE_CHECKING:
    from trainer.models.token_head import TokenHead
    from trainer.parallel.tensor.cross_entropy import VocabularyCut

EngineBuilder = Callable[[PlacedModel, Task, ParallelMesh, RunPlan, int], Engine]
"""A builder of the engine of a strategy, for a model without pipeline stages."""


class ScoringHeads(Protocol):
    """Output heads that compute the `token_scores` of a task in place of logits."""

    @classmethod
    def of(cls, built: Sequence[PlacedModel], task: Task, plan: RunPlan) -> Self | None:
        """Return the heads for placed models, perhaps on `meta`; None: the models return logits.

        Raises:
            UsageError: the recipe asks for such heads, but a model must return its logits.
        """

    @staticmethod
    def notes(built: Sequence[PlacedModel], task: Task, plan: RunPlan, device: torch.device | None) -> list[str]:
        """Return notes for the user on the logits; without a device, not on its kernels."""

    def attach(self, model: nn.Module, cut: VocabularyCut | None, task: Task) -> TokenHead | None:
        """Let the head of a model compute scores; return None for a pipeline stage without the head."""


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
    heads = require_trainable(built, task, plan)
    # Before the engine changes the modules.
    notes = head_notes(built, task, plan, mesh.device)
    built = [replace(part, added_loss=added_loss) for part in built]
    cut = next((part.vocabulary for part in built if part.vocabulary), None)
    task = task.for_vocabulary(cut)
    if heads is not None:
        # The loss comes from the task that knows the cut, and before `for_token_scores` replaces it.
        built = [replace(part, head=heads.attach(part.model, cut, task)) for part in built]
        task = task.for_token_scores()
    if plan.pipeline is not None:
        from trainer.engine.pipelined import build_pipelined

        engine: Engine = build_pipelined(built, task, mesh, plan, total_steps)
    else:
        # Without a pipeline, a rank holds exactly one model.
        (whole,) = built
        build: EngineBuilder = resolved(plan.strategy.builder)
        engine = build(whole, task, mesh, plan, total_steps)
    engine.head_notes = notes
    return engine


def require_trainable(built: Sequence[PlacedModel], task: Task, plan: RunPlan) -> ScoringHeads | None:
    """Refuse placed models, perhaps on `meta`, that a plan cannot train; return the heads that score tokens, if any.

    Raises:
        UsageError: the task cannot generate texts in parts, the layers of the model are unknown although a key needs
            them, or the head must return all logits although the recipe asks for scores.
    """
    if task.generates:
        from trainer.tasks.generated import required_generator

        required_generator().require_whole(plan)
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
    return next((heads for kind in _heads(task) if (heads := kind.of(built, task, plan)) is not None), None)


def head_notes(
    built: Sequence[PlacedModel], task: Task, plan: RunPlan, device: torch.device | None = None
) -> list[str]:
    """Return notes for the user on the logits of placed models; without a device, not on its kernels."""
    return [note for kind in _heads(task) for note in kind.notes(built, task, plan, device)]


def _heads(task: Task) -> Iterable[type[ScoringHeads]]:
    # Resolved for tasks with such scores only: other runs import no head.
    return all_of("head").values() if task.head_blocks else ()
