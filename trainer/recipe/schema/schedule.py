"""The section `schedule`, one class for each schedule of the learning rate. Features and packages register others.

The curves are those of `transformers.get_scheduler`; a test compares them. Its module would import peft, and
bitsandbytes where it is installed, which takes each rank from half a second to some seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from trainer.recipe.schema.section import Section


class ScheduleKeys(Section):
    """The keys of every schedule. A subclass has `name: Literal["NAME"]`, its own keys and its `curve`."""

    phases: ClassVar[tuple[str, ...]] = ("warmup",)  # keys of steps that must fit into the training together
    # Names of transformers, each with our keys by the arguments of their schedule
    foreign_names: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    # Their argument that is a least learning rate, not a share of the peak, and its default, by such a name
    foreign_least_rates: ClassVar[Mapping[str, tuple[str, float | None]]] = {}

    name: str
    warmup: Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, lt=1)] = 0
    """Steps (an integer such as 100), or a fraction of all steps (such as 0.1)."""

    def factor(self, step: int, total_steps: int) -> float:
        """Return the factor of the peak learning rate in the step after `step` steps.

        A schedule of transformers begins with a step at rate 0. This step is left out here, so the W steps of a
        warm-up have 1/(W+1), 2/(W+1), ..., and the next one has 1. All later factors are those of transformers.
        Schedules that decay would reach their end one step after the last.
        """
        warmup = num_steps(self.warmup, total_steps)
        if step < warmup:
            return self.rise((step + 1) / (warmup + 1))
        return self.curve(step - warmup, max(1, total_steps - warmup), warmup)

    def rise(self, share: float) -> float:
        """Return the factor after a share of the warmup."""
        return share

    def curve(self, step: int, steps: int, warmup: int) -> float:
        """Return the factor after `step` of the `steps` that follow the warmup. Steps after these keep the last one."""
        raise NotImplementedError


class Linear(ScheduleKeys):
    """Linear warmup, then a line to 0."""

    foreign_names: ClassVar = {"linear": {}}

    name: Literal["linear"] = "linear"

    def curve(self, step: int, steps: int, warmup: int) -> float:
        return 1.0 - min(1.0, step / steps)


class Cosine(ScheduleKeys):
    """Linear warmup, then half a cosine."""

    foreign_names: ClassVar = {"cosine": {}, "cosine_with_min_lr": {"min_lr_rate": "min_rate"}}
    foreign_least_rates: ClassVar = {"cosine_with_min_lr": ("min_lr", None)}

    name: Literal["cosine"]
    min_rate: float = Field(0.0, ge=0, lt=1)
    """Rate at the end, as a share of the peak."""

    def curve(self, step: int, steps: int, warmup: int) -> float:
        return above(self.min_rate, half_cosine(min(1.0, step / steps)))


class Constant(ScheduleKeys):
    """Linear warmup, then no decay."""

    foreign_names: ClassVar = {"constant": {}, "constant_with_warmup": {}}

    name: Literal["constant"]

    def curve(self, step: int, steps: int, warmup: int) -> float:
        return 1.0


class WarmupStableDecay(ScheduleKeys):
    """Linear warmup, then the peak, then a decay at the end (Hu et al. 2024)."""

    phases: ClassVar = ("warmup", "decay")
    foreign_names: ClassVar = {
        "warmup_stable_decay": {"num_decay_steps": "decay", "decay_type": "decay_shape", "min_lr_ratio": "min_rate"}
    }

    name: Literal["warmup_stable_decay"]
    decay: Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Steps of the decay, or a fraction of all steps; at most the steps after the warmup."""
    decay_shape: Literal["linear", "cosine", "1-sqrt"] = "cosine"
    """Curve of the decay."""
    min_rate: float = Field(0.0, ge=0, lt=1)
    """Rate at the end and at the start of the warmup, as a share of the peak."""

    def rise(self, share: float) -> float:
        return above(self.min_rate, share)

    def curve(self, step: int, steps: int, warmup: int) -> float:
        # Decay and warm-up do not overlap: the warm-up keeps its steps.
        decay = max(1, min(num_steps(self.decay, steps + warmup), steps))
        done = min(1.0, max(0.0, (step - steps + decay) / decay))
        shapes = {"linear": 1.0 - done, "cosine": half_cosine(done), "1-sqrt": 1.0 - math.sqrt(done)}
        return above(self.min_rate, shapes[self.decay_shape])


def num_steps(number: int | float, total_steps: int) -> int:
    """Return a number of steps, or of a fraction of all steps."""
    return number if isinstance(number, int) else round(number * total_steps)


def above(least: float, share: float) -> float:
    """Return the factor at a share of the way from the least factor to 1."""
    return least + (1.0 - least) * share


def half_cosine(done: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * done))


ScheduleSection = Linear | Cosine | Constant | WarmupStableDecay
