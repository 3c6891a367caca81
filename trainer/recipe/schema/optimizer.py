"""The section `optimizer`, one class for each optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from trainer.recipe.schema.fields import Name, Patterns
from trainer.recipe.schema.section import Contradiction, Section


class ParameterGroup(Section):
    """Parameters with a learning rate or a weight decay of their own."""

    match: Name | Patterns
    """Names or patterns of modules and parameters, such as `classifier`."""
    learning_rate: Annotated[float, Field(gt=0)] | None = None
    """Peak learning rate of the schedule; null: that of the optimizer."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Not applied to biases and norm weights; null: that of the optimizer."""


class _OptimizerKeys(Section):
    name: str
    learning_rate: float = Field(gt=0)
    """Peak learning rate of the schedule."""
    weight_decay: float = Field(0.0, ge=0)
    """Not applied to biases and norm weights."""
    groups: Annotated[list[ParameterGroup], Field(min_length=1)] | None = None
    """Parameters with values of their own, each in one group only."""
    layer_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Factor of the learning rate from each layer to the one below; the head has the whole rate. null: 1."""

    def contradictions(self) -> Iterator[Contradiction]:
        for index, group in enumerate(self.groups or ()):
            if group.learning_rate is None and group.weight_decay is None:
                text = "must set `learning_rate` or `weight_decay`; to train nothing of it, use `model.freeze`"
                yield Contradiction((("optimizer", "groups", index),), text)


class _AdamWKeys(_OptimizerKeys):
    learning_rate: float = Field(5e-5, gt=0)
    """Peak learning rate of the schedule."""
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] = Field(
        default=[0.9, 0.999]
    )
    """Decay rates of the running means of the gradient and of its square."""
    epsilon: float = Field(1e-8, gt=0)
    """Added to the square root of the second mean."""


class AdamW(_AdamWKeys):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019)."""

    name: Literal["adamw"] = "adamw"


class AdamW8bit(_AdamWKeys):
    """AdamW with moments in 8 bits (Dettmers et al. 2022), in blocks that do not depend on the layout."""

    name: Literal["adamw_8bit"]


class SGD(_OptimizerKeys):
    """Stochastic gradient descent."""

    name: Literal["sgd"]
    momentum: float = Field(0.0, ge=0, lt=1)
    """0: no momentum."""


class Muon(_OptimizerKeys):
    """Muon (Jordan et al. 2024) for the matrices of the repeated layers; AdamW for all other parameters.

    Updates of matrices have the size of AdamW's (Liu et al. 2025), so both share learning rate and weight decay.
    """

    name: Literal["muon"]
    weight_decay: float = Field(0.1, ge=0)
    """Not applied to biases and norm weights."""
    momentum: float = Field(0.95, ge=0, lt=1)
    """Decay rate of the running mean of a matrix's gradient."""
    iterations: int = Field(5, ge=1, le=99)
    """Newton-Schulz iterations, in bf16."""
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] = Field(
        default=[0.9, 0.999]
    )
    """Decay rates of AdamW's running means."""
    epsilon: float = Field(1e-8, gt=0)
    """Added by AdamW to the square root of the second mean."""


class Adafactor(_OptimizerKeys):
    """Adafactor (Shazeer & Stern 2018): the second moments of a matrix are a row and a column."""

    name: Literal["adafactor"]
    learning_rate: float = Field(0.01, gt=0)
    """Peak learning rate of the schedule, relative to the size of each weight; at most 1 / sqrt(step)."""
    beta2_decay: float = Field(-0.8, le=0)
    """Exponent of the step in the decay rate of second moments."""
    clip_threshold: float = Field(1.0, ge=1)
    """Maximum root mean square of an update."""
    minimum_scale: float = Field(1e-3, ge=0)
    """Minimum size of a weight, which scales its update."""


class ScheduleFreeAdamW(_OptimizerKeys):
    """Schedule-free AdamW (Defazio et al. 2024): averaged weights in place of a decaying learning rate.

    Evaluations, checkpoints and exports have the averaged weights.
    """

    name: Literal["schedule_free_adamw"]
    betas: Annotated[list[Annotated[float, Field(gt=0, lt=1)]], Field(min_length=2, max_length=2)] = Field(
        default=[0.9, 0.999]
    )
    """Share of the averaged weights in the trained ones; decay rate of the mean of the squared gradient."""
    epsilon: float = Field(1e-8, gt=0)
    """Added to the square root of that mean."""


OptimizerSection = AdamW | AdamW8bit | SGD | Muon | Adafactor | ScheduleFreeAdamW
