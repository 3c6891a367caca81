"""The optimizer of a recipe. Its section names the class."""

from __future__ import annotations

from trainer.base.extensions import resolved
from trainer.engine.optimizers.base import EngineOptimizer
from trainer.engine.optimizers.parameters import TrainedParameters
from trainer.recipe.registered import asked_for
from trainer.recipe.schema import OptimizerKeys


def optimizer_class(section: OptimizerKeys) -> type[EngineOptimizer]:
    """Return the class that the section of a recipe names."""
    plain: type[EngineOptimizer] = resolved(section.implementation)
    return plain


def build_optimizer(section: OptimizerKeys, trained: TrainedParameters) -> EngineOptimizer:
    """Return the optimizer of a section, with the updates that the recipe of its parameters asks for."""
    kind = optimizer_class(section)
    if updates := asked_for("update", trained.recipe) if trained.recipe else ():
        # Updates stand before the optimizer in the order of classes, so `super` in them reaches it.
        kind = type(kind.__name__, (*updates, kind), {"recipe": trained.recipe})
    return kind.build(section, trained)
