"""The learning rate, a function of recipe and step alone."""

from __future__ import annotations

import math

from trainer.recipe.schema import OptimizerSection, Schedule


def learning_rate_factor(recipe: Schedule, step: int, total_steps: int) -> float:
    """Return the factor of the learning rate in the step after `step` steps.

    Over W warm-up steps it is 1/(W+1), 2/(W+1), ...; the next step has 1. Linear and cosine schedules would reach 0 one
    step after the last, so no step has a rate of 0.
    """
    warmup = recipe.warmup if isinstance(recipe.warmup, int) else round(recipe.warmup * total_steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if recipe.name == "constant":
        return 1.0
    done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    return 1.0 - done if recipe.name == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))


def learning_rate(optimizer: OptimizerSection, schedule: Schedule, step: int, total_steps: int) -> float:
    """Return the learning rate of the step after `step` steps."""
    return optimizer.learning_rate * learning_rate_factor(schedule, step, total_steps)
