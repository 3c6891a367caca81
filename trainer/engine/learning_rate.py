"""The learning rate, a function of recipe and step alone.

The curves are those of `transformers.get_scheduler`; a test compares them. Its module would import peft, and
bitsandbytes where it is installed, which takes each rank from half a second to some seconds.
"""

from __future__ import annotations

import math

from trainer.recipe.schema import OptimizerKeys, ScheduleSection
from trainer.recipe.schema.schedule import (
    Cosine,
    CosineWithRestarts,
    InverseSqrt,
    Linear,
    Polynomial,
    WarmupStableDecay,
)


def learning_rate_factor(schedule: ScheduleSection, step: int, total_steps: int) -> float:
    """Return the factor of the learning rate in the step after `step` steps.

    A schedule of transformers begins with a step at rate 0. This step is left out here, so the W steps of a warm-up
    have 1/(W+1), 2/(W+1), ..., and the next one has 1. All later factors are those of transformers. Schedules that
    decay would reach their end one step after the last.
    """
    warmup = _steps(schedule.warmup, total_steps)
    least = schedule.min_rate if isinstance(schedule, Cosine | Polynomial | WarmupStableDecay) else 0.0
    if step < warmup:
        risen = (step + 1) / (warmup + 1)
        return least + (1.0 - least) * risen if isinstance(schedule, WarmupStableDecay) else risen
    # Steps after the end of the schedule keep its last rate.
    done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    match schedule:
        case Linear():
            share = 1.0 - done
        case Cosine():
            share = _half_cosine(done)
        case CosineWithRestarts(cycles=cycles):
            # At `done` = 1, the remainder would be 0 and the rate would jump back to its top.
            share = _half_cosine(cycles * done % 1.0) if done < 1.0 else 0.0
        case Polynomial(power=power):
            share = (1.0 - done) ** power
        case InverseSqrt(timescale=timescale):
            scale = timescale or warmup or 10_000
            share = math.sqrt(scale / (scale + step - warmup))
        case WarmupStableDecay(decay_shape=shape):
            # Decay and warm-up do not overlap: the warm-up keeps its steps.
            decay = max(1, min(_steps(schedule.decay, total_steps), total_steps - warmup))
            done = min(1.0, max(0.0, (step - total_steps + decay) / decay))
            decayed = {"linear": 1.0 - done, "cosine": _half_cosine(done), "1-sqrt": 1.0 - math.sqrt(done)}
            share = decayed[shape]
        case _:
            share = 1.0
    return least + (1.0 - least) * share


def _steps(number: int | float, total_steps: int) -> int:
    return number if isinstance(number, int) else round(number * total_steps)


def _half_cosine(done: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * done))


def learning_rate(optimizer: OptimizerKeys, schedule: ScheduleSection, step: int, total_steps: int) -> float:
    """Return the learning rate of the step after `step` steps."""
    return optimizer.learning_rate * learning_rate_factor(schedule, step, total_steps)
