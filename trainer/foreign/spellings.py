"""What an unknown key of a recipe is called here, if another tool knows it."""

from __future__ import annotations

from functools import cache

from trainer.foreign.accelerate import ACCELERATE
from trainer.foreign.counterpart import Counterpart
from trainer.foreign.deepspeed import DEEPSPEED
from trainer.foreign.megatron import MEGATRON
from trainer.foreign.training_arguments import TRAINING_ARGUMENTS


def _normal(spelling: str) -> str:
    return spelling.lstrip("-").replace("-", "_")


@cache
def _table() -> dict[str, Counterpart]:
    tables = (ACCELERATE, MEGATRON, DEEPSPEED, TRAINING_ARGUMENTS)  # where they share a spelling, the last one counts
    return {_normal(spelling): row for table in tables for spelling, row in table.items()}


def counterpart(path: str) -> Counterpart | None:
    """What stands here for another tool's key; None where the spelling is no tool's.

    `path` is a dotted key path, dashes or underscores, with or without leading dashes. The longest known ending
    counts, so that `parallel.zero_optimization.stage` is recognised as well as `zero_optimization.stage`.
    """
    parts = _normal(path).split(".")
    return next((row for start in range(len(parts)) if (row := _table().get(".".join(parts[start:])))), None)
