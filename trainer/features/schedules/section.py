"""The section `schedule` of a recipe with one of these schedules, and their curves."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from trainer.recipe.schema.schedule import ScheduleKeys, above, half_cosine


class CosineWithRestarts(ScheduleKeys):
    """Linear warmup, then halves of a cosine that each begin at the peak and end at 0."""

    foreign_names: ClassVar = {"cosine_with_restarts": {"num_cycles": "cycles"}}

    name: Literal["cosine_with_restarts"]
    cycles: int = Field(1, ge=1)
    """Number of these halves."""

    def curve(self, step: int, steps: int, warmup: int) -> float:
        # At the end, the remainder would be 0 and the rate would jump back to its top.
        return half_cosine(self.cycles * (step / steps) % 1.0) if step < steps else 0.0


class Polynomial(ScheduleKeys):
    """Linear warmup, then a power of the share of steps that are left."""

    foreign_names: ClassVar = {"polynomial": {"power": "power"}}
    foreign_least_rates: ClassVar = {"polynomial": ("lr_end", 1e-7)}

    name: Literal["polynomial"]
    power: float = Field(1.0, gt=0)
    """Exponent."""
    min_rate: float = Field(0.0, ge=0, lt=1)
    """Rate at the end, as a share of the peak."""

    def curve(self, step: int, steps: int, warmup: int) -> float:
        return above(self.min_rate, (1.0 - min(1.0, step / steps)) ** self.power)


class InverseSqrt(ScheduleKeys):
    """Linear warmup, then the inverse square root of the step. It does not depend on the number of steps."""

    foreign_names: ClassVar = {"inverse_sqrt": {"timescale": "timescale"}}

    name: Literal["inverse_sqrt"]
    timescale: Annotated[int, Field(ge=1)] | None = None
    """Steps after the warmup until the rate is 0.71 of the peak; null: the steps of the warmup, or 10,000 without."""

    def curve(self, step: int, steps: int, warmup: int) -> float:
        scale = self.timescale or warmup or 10_000
        return math.sqrt(scale / (scale + step))
