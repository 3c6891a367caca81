"""From recipe and world size to layout and batch arithmetic: every derived number, derived once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainer.errors import RecipeError
from trainer.recipe.schema import Parallel, Recipe
from trainer.recipe.strategies import STRATEGIES, Strategy


@dataclass(frozen=True)
class Layout:
    """Degrees of the parallel axes; their product is the world size."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    pp: int = 1

    @property
    def data_parallel_size(self) -> int:
        """Ranks that see different rows of a global batch."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        return self.data_parallel_size * self.tp * self.pp

    def __str__(self) -> str:
        degrees = {"pp": self.pp, "dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, "tp": self.tp}
        return " x ".join(f"{axis} {size}" for axis, size in degrees.items() if size > 1) or "one process"


@dataclass(frozen=True)
class BatchPlan:
    """How one global batch is cut: over data-parallel ranks, then into microbatches."""

    global_batch_size: int
    data_parallel_size: int
    micro_batch_size: int  # the most rows in one forward pass: the recipe's, or the rank's whole share if that is less
    num_microbatches: int  # forward and backward passes of one rank in one optimizer step

    @property
    def rank_batch_size(self) -> int:
        """Rows of one rank in one optimizer step."""
        return self.global_batch_size // self.data_parallel_size

    def __str__(self) -> str:
        return (
            f"{self.global_batch_size} rows a step = {_counted(self.data_parallel_size, 'data-parallel rank')}"
            f" x {_counted(self.num_microbatches, 'microbatch', 'es')} of at most"
            f" {_counted(self.micro_batch_size, 'row')}"
        )


def _counted(count: int, noun: str, plural: str = "s") -> str:
    return f"{count} {noun}{plural if count != 1 else ''}"


@dataclass(frozen=True)
class RunPlan:
    """The recipe on a known number of ranks."""

    recipe: Recipe
    layout: Layout
    batch: BatchPlan

    @property
    def strategy(self) -> Strategy:
        """The row of the table of strategies."""
        return STRATEGIES[self.recipe.parallel.strategy]

    def steps_per_epoch(self, num_rows: int) -> int:
        """Optimizer steps in one pass over `num_rows` training rows; the last may be ragged."""
        return math.ceil(num_rows / self.batch.global_batch_size)

    def total_steps(self, num_rows: int) -> int:
        """Optimizer steps of the whole training, where the schedule ends."""
        return self.recipe.training.max_steps or self.recipe.training.epochs * self.steps_per_epoch(num_rows)


def _sizes_near(size: int, divisor: int) -> str:
    below, above = size // divisor * divisor, -(-size // divisor) * divisor
    return f"{below} or {above}" if below else f"{above}"


def _layout(parallel: Parallel, world_size: int, local_world_size: int) -> Layout:
    """The axes over which the strategy replicates and shards.

    Raises:
        RecipeError: the strategy does not fit on that many ranks.
    """
    strategy = STRATEGIES[parallel.strategy]
    tensor = parallel.tensor
    if world_size % tensor:
        raise RecipeError(
            [
                f"`parallel.tensor` must divide the {_counted(world_size, 'process', 'es')}, but is {tensor}; use"
                f" {tensor} processes or a multiple of it, or `parallel.tensor` 1"
            ]
        )
    if strategy.single_process and world_size > 1:
        raise RecipeError(
            [f"`parallel.strategy` {strategy.name} is one process, but there are {world_size}; use ddp, or one process"]
        )
    ranks = world_size // tensor  # the data-parallel ones
    if not strategy.cuts_anything:
        return Layout(dp_replicate=ranks, tp=tensor)
    shard = ranks
    if strategy.groups:
        shard = max(1, min(local_world_size // tensor, ranks)) if parallel.shard == "auto" else parallel.shard
    if ranks % shard:
        divisors = ", ".join(str(size) for size in range(1, ranks + 1) if ranks % size == 0)
        what = "processes" if tensor == 1 else "data-parallel ranks"
        raise RecipeError([f"`parallel.shard` must divide the {ranks} {what}, but is {shard}; use one of {divisors}"])
    return Layout(dp_replicate=ranks // shard, dp_shard=shard, tp=tensor)


def plan_run(recipe: Recipe, world_size: int, local_world_size: int | None = None) -> RunPlan:
    """Lays the recipe out over `world_size` ranks, `local_world_size` of them on each node (None: all on one).

    Raises:
        RecipeError: every rule that recipe and world size break together, with the nearest values that fit.
    """
    layout = _layout(recipe.parallel, world_size, local_world_size or world_size)
    size, ranks = recipe.training.global_batch_size, layout.data_parallel_size
    if size % ranks:
        raise RecipeError(
            [
                f"`training.global_batch_size` must be divisible by the data-parallel size {ranks}, but is {size};"
                f" use {_sizes_near(size, ranks)}, or a number of processes that divides {size}"
            ]
        )
    share = size // ranks
    num_microbatches = math.ceil(share / recipe.training.micro_batch_size)
    return RunPlan(
        recipe,
        layout,
        BatchPlan(
            global_batch_size=size,
            data_parallel_size=ranks,
            micro_batch_size=math.ceil(share / num_microbatches),
            num_microbatches=num_microbatches,
        ),
    )
