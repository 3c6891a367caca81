"""The section `optimizer` of a recipe with schedule-free AdamW."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from trainer.recipe.schema.optimizer import ExclusionRow, OptimizerKeys


class ScheduleFreeAdamW(OptimizerKeys):
    """Schedule-free AdamW (Defazio et al. 2024): averaged weights in place of a decaying learning rate.

    Evaluations, checkpoints and exports have the averaged weights.
    """

    implementation: ClassVar[str] = "trainer.features.schedule_free.optimizer:ScheduleFreeAdamW"
    replaces_decay: ClassVar[bool] = True
    exclusions: ClassVar[tuple[ExclusionRow, ...]] = (
        (
            {"schedule.name": "other than constant"},
            "the average of the weights takes the place of a decaying rate",
            "set `schedule.name` to constant; `schedule.warmup` may stay",
        ),
        (
            {"parallel.strategy": ["zero3"]},
            "DeepSpeed steps each group of weights apart, but the average counts the steps of all",
            "use zero2 or fsdp",
        ),
        ({"training.ema_decay": "a share"}, "it averages the weights itself", "set the decay to null"),
    )

    name: Literal["schedule_free_adamw"]
    betas: Annotated[list[Annotated[float, Field(gt=0, lt=1)]], Field(min_length=2, max_length=2)] = Field(
        default=[0.9, 0.999]
    )
    """Share of the averaged weights in the trained ones; decay rate of the mean of the squared gradient."""
    epsilon: float = Field(1e-8, gt=0)
    """Added to the square root of that mean."""
