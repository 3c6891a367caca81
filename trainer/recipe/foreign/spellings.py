"""Look-up of a spelling in the tables of all tools."""

from __future__ import annotations

from functools import cache

from trainer.recipe.foreign.accelerate import ACCELERATE
from trainer.recipe.foreign.counterpart import Counterpart
from trainer.recipe.foreign.deepspeed import DEEPSPEED
from trainer.recipe.foreign.megatron import MEGATRON
from trainer.recipe.foreign.peft import LORA_CONFIG
from trainer.recipe.foreign.training_arguments import TRAINING_ARGUMENTS


def _normal(spelling: str) -> str:
    return spelling.lstrip("-").replace("-", "_")


@cache
def _table() -> dict[str, Counterpart]:
    tables = (
        LORA_CONFIG,
        ACCELERATE,
        MEGATRON,
        DEEPSPEED,
        TRAINING_ARGUMENTS,
    )  # the last table with a spelling takes precedence
    return {_normal(spelling): row for table in tables for spelling, row in table.items()}


def counterpart(path: str) -> Counterpart | None:
    """Return the row of another tool's key; None if no tool has it.

    Args:
        path: A dotted key path, with dashes or underscores. The longest known suffix counts, so that
            `parallel.zero_optimization.stage` gives the row of `zero_optimization.stage`.
    """
    parts = _normal(path).split(".")
    return next((row for start in range(len(parts)) if (row := _table().get(".".join(parts[start:])))), None)
