"""The optimizer of a recipe. Its section names the class."""

from __future__ import annotations

from trainer.base.extensions import resolved
from trainer.engine.optimizers.base import EngineOptimizer
from trainer.engine.optimizers.parameters import TrainedParameters
from trainer.recipe.schema import OptimizerKeys


def optimizer_class(section: OptimizerKeys, ema_decay: float | None = None) -> type[EngineOptimizer]:
    """Return the class of a recipe's optimizer, with averages of the weights if they have a decay."""
    plain: type[EngineOptimizer] = resolved(section.implementation)
    if ema_decay is None:
        return plain
    from trainer.engine.optimizers.averaging import averaged

    return averaged(plain, ema_decay)


def build_optimizer(section: OptimizerKeys, trained: TrainedParameters) -> EngineOptimizer:
    return optimizer_class(section, trained.ema_decay).build(section, trained)
