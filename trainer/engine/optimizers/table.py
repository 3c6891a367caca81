"""The optimizers, by their names in a recipe."""

from __future__ import annotations

from trainer.base.extensions import resolved
from trainer.engine.optimizers.base import EngineOptimizer
from trainer.engine.optimizers.parameters import TrainedParameters
from trainer.recipe.schema import OptimizerSection

# Texts, so that a run imports its own optimizer only.
CLASSES = {
    "adamw": "adamw:AdamW",
    "adamw_8bit": "eight_bits:AdamW8bit",
    "sgd": "sgd:SGD",
    "muon": "muon:Muon",
    "adafactor": "adafactor:Adafactor",
    "schedule_free_adamw": "schedule_free:ScheduleFreeAdamW",
}


def optimizer_class(section: OptimizerSection, ema_decay: float | None = None) -> type[EngineOptimizer]:
    """Return the class of a recipe's optimizer, with averages of the weights if they have a decay."""
    plain: type[EngineOptimizer] = resolved(f"trainer.engine.optimizers.{CLASSES[section.name]}")
    if ema_decay is None:
        return plain
    from trainer.engine.optimizers.averaging import averaged

    return averaged(plain, ema_decay)


def build_optimizer(section: OptimizerSection, trained: TrainedParameters) -> EngineOptimizer:
    return optimizer_class(section, trained.ema_decay).build(section, trained)
