"""The section `schedule`, one class for each schedule."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from trainer.recipe.schema.section import Section


class _Warmup(Section):
    name: str
    warmup: Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, lt=1)] = 0
    """Steps (an integer such as 100), or a fraction of all steps (such as 0.1)."""


class Linear(_Warmup):
    """Linear warmup, then a line to 0."""

    name: Literal["linear"] = "linear"


class Cosine(_Warmup):
    """Linear warmup, then half a cosine."""

    name: Literal["cosine"]
    min_rate: float = Field(0.0, ge=0, lt=1)
    """Rate at the end, as a share of the peak."""


class CosineWithRestarts(_Warmup):
    """Linear warmup, then halves of a cosine that each begin at the peak and end at 0."""

    name: Literal["cosine_with_restarts"]
    cycles: int = Field(1, ge=1)
    """Number of these halves."""


class Polynomial(_Warmup):
    """Linear warmup, then a power of the share of steps that are left."""

    name: Literal["polynomial"]
    power: float = Field(1.0, gt=0)
    """Exponent."""
    min_rate: float = Field(0.0, ge=0, lt=1)
    """Rate at the end, as a share of the peak."""


class Constant(_Warmup):
    """Linear warmup, then no decay."""

    name: Literal["constant"]


class InverseSqrt(_Warmup):
    """Linear warmup, then the inverse square root of the step. It does not depend on the number of steps."""

    name: Literal["inverse_sqrt"]
    timescale: Annotated[int, Field(ge=1)] | None = None
    """Steps after the warmup until the rate is 0.71 of the peak; null: the steps of the warmup, or 10,000 without."""


class WarmupStableDecay(_Warmup):
    """Linear warmup, then the peak, then a decay at the end (Hu et al. 2024)."""

    name: Literal["warmup_stable_decay"]
    decay: Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Steps of the decay, or a fraction of all steps; at most the steps after the warmup."""
    decay_shape: Literal["linear", "cosine", "1-sqrt"] = "cosine"
    """Curve of the decay."""
    min_rate: float = Field(0.0, ge=0, lt=1)
    """Rate at the end and at the start of the warmup, as a share of the peak."""


ScheduleSection = Linear | Cosine | CosineWithRestarts | Polynomial | Constant | InverseSqrt | WarmupStableDecay
