"""The optimizers, by their names in a recipe."""

from __future__ import annotations

from trainer.engine.optimizers.adafactor import Adafactor
from trainer.engine.optimizers.adamw import AdamW
from trainer.engine.optimizers.averaging import averaged
from trainer.engine.optimizers.base import EngineOptimizer
from trainer.engine.optimizers.eight_bits import AdamW8bit
from trainer.engine.optimizers.muon import Muon
from trainer.engine.optimizers.parameters import TrainedParameters
from trainer.engine.optimizers.schedule_free import ScheduleFreeAdamW
from trainer.engine.optimizers.sgd import SGD
from trainer.recipe.schema import OptimizerSection

OPTIMIZERS: dict[str, type[EngineOptimizer]] = {
    "adamw": AdamW,
    "adamw_8bit": AdamW8bit,
    "sgd": SGD,
    "muon": Muon,
    "adafactor": Adafactor,
    "schedule_free_adamw": ScheduleFreeAdamW,
}


def optimizer_class(section: OptimizerSection, ema_decay: float | None = None) -> type[EngineOptimizer]:
    """Return the class of a recipe's optimizer, with averages of the weights if they have a decay."""
    found = OPTIMIZERS[section.name]
    return found if ema_decay is None else averaged(found, ema_decay)


def build_optimizer(section: OptimizerSection, trained: TrainedParameters) -> EngineOptimizer:
    return optimizer_class(section, trained.ema_decay).build(section, trained)
