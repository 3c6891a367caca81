"""Layout, batch and pipeline arithmetic: every number that follows from a recipe and its world size."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal

from trainer.base.errors import RecipeError
from trainer.base.extensions import registered, resolved
from trainer.recipe.registered import asked_for
from trainer.recipe.schedules import SCHEDULES, PipelineSchedule, stages_of_rank
from trainer.recipe.schema import Parallel, Recipe
from trainer.recipe.strategies import STRATEGIES, Strategy


@dataclass(frozen=True)
class Layout:
    """The sizes of the parallel axes; their product is the world size."""

    dp_replicate: int = 1
    dp_shard: int = 1
    ep: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each axis of the mesh, by its name."""
        # Outermost first: ranks of the innermost axes are neighbours on a node, because they communicate most.
        names = ("pp", "dp_replicate", "dp_shard", "ep", "cp", "tp")
        return {name: getattr(self, name) for name in names}

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks that process different rows of a global batch."""
        return self.dp_replicate * self.dp_shard * self.ep

    @property
    def ranks_per_row(self) -> int:
        """Number of ranks that process the same rows on one stage, by parts of matrices or of sequences."""
        return self.cp * self.tp

    @property
    def world_size(self) -> int:
        return self.data_parallel_size * self.ranks_per_row * self.pp

    def __str__(self) -> str:
        return " x ".join(f"{axis} {n}" for axis, n in self.sizes.items() if n > 1) or "one process"


@dataclass(frozen=True)
class BatchPlan:
    """Split of one global batch over data-parallel ranks and into microbatches."""

    global_batch_size: int
    data_parallel_size: int
    micro_batch_size: int  # maximum rows in one forward pass, at most those of the recipe and of the rank
    num_microbatches: int  # forward and backward passes of one rank in one optimizer step
    num_passes: int = 1  # through the pipeline in one optimizer step, each with the same number of microbatches
    equal_widths: bool = False  # pad all microbatches of a step to one length, as pipeline stages require
    micro_batch_tokens: int | None = None  # maximum tokens in one forward pass; the two numbers above are for the
    # longest rows, and a step of shorter rows has fewer microbatches
    padding_free: bool = False  # count tokens without padding
    warmup: str = ""  # the smaller batches before, as the user sees them

    @property
    def microbatches_per_pass(self) -> int:
        """Microbatches in one pass through the pipeline; without a pipeline, all of the step."""
        return self.num_microbatches // self.num_passes

    @property
    def rank_batch_size(self) -> int:
        """Rows that one rank processes in one optimizer step."""
        return self.global_batch_size // self.data_parallel_size

    def __str__(self) -> str:
        if self.micro_batch_tokens is not None:
            return (
                f"{self.global_batch_size} rows a step = {_counted(self.data_parallel_size, 'data-parallel rank')}"
                f" x at most {_counted(self.num_microbatches, 'microbatch', 'es')} of at most"
                f" {self.micro_batch_tokens:,} tokens, {'without' if self.padding_free else 'with'} padding"
                f"{self.warmup}"
            )
        return (
            f"{self.global_batch_size} rows a step = {_counted(self.data_parallel_size, 'data-parallel rank')}"
            f"{f' x {self.num_passes} passes' if self.num_passes > 1 else ''}"
            f" x {_counted(self.microbatches_per_pass, 'microbatch', 'es')} of at most"
            f" {_counted(self.micro_batch_size, 'row')}{self.warmup}"
        )


class BatchSizes:
    """The rows of each global batch of a recipe, a function of the step only; a feature registers other sizes."""

    def __init__(self, recipe: Recipe) -> None:
        self.training = recipe.training

    def of_step(self, step: int) -> int:
        """Return the rows of a step, from 0; the last step of an epoch may have fewer."""
        return self.training.global_batch_size

    def total_steps(self, num_rows: int) -> int:
        """Return the steps of a training with epochs of `num_rows` rows; a part of a step counts as one."""
        epochs = Fraction(str(self.training.epochs))  # by its digits, because 0.1 times 30 is above 3 for floats
        return self.training.max_steps or math.ceil(epochs * math.ceil(num_rows / self.training.global_batch_size))

    def full_steps(self, steps: int) -> float:
        """Return the steps of the recipe's batch size with as many rows as the first `steps` steps."""
        return steps

    def checked(self, num_ranks: int) -> str:
        """Return the sizes for the user, empty if they are equal; raise `RecipeError` if ranks cannot divide them."""
        return ""


def batch_sizes(recipe: Recipe) -> BatchSizes:
    kind: type[BatchSizes] = next(iter(asked_for("batch_sizes", recipe)), BatchSizes)
    return kind(recipe)


def _counted(count: int, noun: str, plural: str = "s") -> str:
    return f"{count} {noun}{plural if count != 1 else ''}"


@dataclass(frozen=True)
class PipelinePlan:
    """Assignment of stages to the ranks of the pipeline axis, and the resulting bubble."""

    schedule: PipelineSchedule
    num_ranks: int
    stages_per_rank: int
    num_microbatches: int  # in one pass

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.stages_per_rank

    @property
    def bubble(self) -> float:
        """The fraction of a pass in which a rank idles, if all stages have equal cost."""
        return self.schedule.bubble(self.num_ranks, self.stages_per_rank, self.num_microbatches)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages on a rank of the pipeline axis, in order."""
        return stages_of_rank(self.num_ranks, self.stages_per_rank, rank, self.schedule.mapping)

    def rank_of(self, stage: int) -> int:
        """Return the rank of the pipeline axis that holds a stage."""
        return next(rank for rank in range(self.num_ranks) if stage in self.stages_of(rank))

    def __str__(self) -> str:
        several = f" x {self.stages_per_rank} a rank" if self.stages_per_rank > 1 else ""
        return (
            f"{self.schedule.name}, {self.num_ranks} ranks{several},"
            f" {_counted(self.num_microbatches, 'microbatch', 'es')} a pass; bubble {self.bubble:.1%}"
        )


@dataclass(frozen=True)
class RunPlan:
    """A recipe laid out over a known number of ranks."""

    recipe: Recipe
    layout: Layout
    batch: BatchPlan
    pipeline: PipelinePlan | None = None

    @property
    def strategy(self) -> Strategy:
        return STRATEGIES[self.recipe.parallel.strategy]

    def engine_keys(self) -> dict[str, Any]:
        """Return the configuration of another package's engine; {} for the engines of trainer."""
        name = self.strategy.configuration
        keys: dict[str, Any] = resolved(name)(self) if name else {}
        return keys

    @property
    def copies_ahead(self) -> bool:
        """Whether a GPU gets each microbatch during the passes of the one before it.

        A pipeline joins the microbatches of a pass on the host; DataParallel cuts them for its GPUs.
        """
        return self.pipeline is None and not self.strategy.single_process

    def steps_per_epoch(self, num_rows: int) -> int:
        """Return the optimizer steps in one epoch of `num_rows` rows; the last batch may be smaller."""
        return math.ceil(num_rows / self.batch.global_batch_size)

    def total_steps(self, num_rows: int, **other: Any) -> int:
        """Return the optimizer steps of the whole training, at which the schedule ends, or with other keys of it."""
        training = self.recipe.training.model_copy(update=other)
        return batch_sizes(self.recipe.model_copy(update={"training": training})).total_steps(num_rows)


def _layout(parallel: Parallel, world_size: int, local_world_size: int) -> Layout:
    strategy = STRATEGIES[parallel.strategy]
    cut = _checked_cut(parallel, world_size)
    if strategy.single_process and world_size > 1:
        raise RecipeError(
            f"`parallel.strategy` {strategy.name} is one process, but there are {world_size}; use ddp, or one process"
        )
    ranks = world_size // cut.world_size * cut.ep  # data-parallel ranks
    if not strategy.cuts_anything:
        return replace(cut, dp_replicate=ranks // cut.ep)
    shard = ranks
    if strategy.groups and parallel.shard != "auto":
        shard = parallel.shard
    elif strategy.groups:
        # The ranks of a row are neighbours, so a node has this many data-parallel ranks.
        shard = max(1, min(local_world_size // cut.ranks_per_row, ranks))
        if shard == 1 < ranks:  # would need as much memory as ddp
            node = "one rank" if local_world_size == 1 else "one group of tensor and context ranks"
            raise RecipeError(
                f"`parallel.shard` auto shards over the ranks of a node, but each node has only {node}, so nothing"
                f" would be sharded; set a number that divides the {ranks} data-parallel ranks, or use fsdp or ddp"
            )
    if ranks % shard:
        divisors = ", ".join(str(size) for size in range(1, ranks + 1) if ranks % size == 0)
        unit = "processes" if cut.world_size == 1 else "data-parallel ranks"
        raise RecipeError(f"`parallel.shard` must divide the {ranks} {unit}, but is {shard}; use one of {divisors}")
    if shard % cut.ep:
        (key,) = axis_degree(parallel, "experts")
        raise RecipeError(
            f"`parallel.shard` must be a multiple of `parallel.{key}` {cut.ep}, but is {shard}; use"
            f" {math.lcm(shard, cut.ep)}, or a `parallel.{key}` that divides {shard}"
        )
    return replace(cut, dp_replicate=ranks // shard, dp_shard=shard // cut.ep)


def axis_degree(parallel: Parallel, kind: Literal["axis", "experts"] = "axis") -> dict[str, int]:
    """Return the registered key of `parallel` with the number of context or expert ranks, and that number, if any."""
    keys = [row.name.removeprefix("parallel.") for row in registered(kind)]
    return {key: getattr(parallel, key) for key in keys}


def _checked_cut(parallel: Parallel, world_size: int) -> Layout:
    """Return the layout of the ranks with different weights: stages, expert, context and tensor ranks."""
    of_axis, of_experts = axis_degree(parallel), axis_degree(parallel, "experts")
    cut = Layout(
        ep=math.prod(of_experts.values()), cp=math.prod(of_axis.values()), tp=parallel.tensor,
        pp=parallel.pipeline.stages,
    )  # fmt: skip
    if world_size % cut.world_size:
        degrees = {"pipeline.stages": cut.pp, "tensor": cut.tp, **of_axis, **of_experts}
        (key, degree), *others = [(key, degree) for key, degree in degrees.items() if degree > 1]
        product = "".join(f"times `parallel.{other}` {size} " for other, size in others)
        whole = "1 stage" if key == "pipeline.stages" else f"`parallel.{key}` 1"
        if world_size % (cut.world_size // degree):  # the other degrees do not divide it either
            whole = "smaller degrees"
        raise RecipeError(
            f"`parallel.{key}` {product}must divide the {_counted(world_size, 'process', 'es')}, but is {degree}; use"
            f" {cut.world_size} processes or a multiple of it, or {whole}"
        )
    return cut


def plan_run(recipe: Recipe, world_size: int, local_world_size: int | None = None) -> RunPlan:
    """Compute the layout, batch and pipeline of a recipe.

    Args:
        local_world_size: The number of ranks on each node; None if all are on one node.

    Raises:
        RecipeError: the recipe does not support this number of ranks; the message gives the nearest valid values.
    """
    if asked_for("chain", recipe):
        raise RecipeError("`stages` are several trainings, but this takes one; load one of them, as in stage=NAME")
    parallel = recipe.parallel
    for launch in asked_for("elastic", recipe):
        parallel = launch().fitted(parallel, world_size)
    layout = _layout(parallel, world_size, local_world_size or world_size)
    size, ranks = recipe.training.global_batch_size, layout.data_parallel_size
    if size % ranks:
        near = (size // ranks * ranks, -(-size // ranks) * ranks)
        raise RecipeError(
            f"`training.global_batch_size` must be divisible by the data-parallel size {ranks}, but is {size};"
            f" use {' or '.join(str(count) for count in near if count)}, or a number of processes that divides {size}"
        )
    share = size // ranks
    num_passes, pipeline = _pipeline(recipe, share) if layout.pp > 1 else (1, None)
    if pipeline is not None:
        num_microbatches = num_passes * pipeline.num_microbatches
    else:
        num_microbatches = math.ceil(share / _most_rows(recipe))
    # The microbatches share the rows evenly: 10 rows with a limit of 8 become 5 and 5.
    micro_batch_size = math.ceil(share / num_microbatches)
    batch = BatchPlan(
        size,
        ranks,
        micro_batch_size,
        num_microbatches,
        num_passes,
        equal_widths=layout.pp > 1,
        micro_batch_tokens=recipe.training.micro_batch_tokens,
        padding_free=recipe.data.padding_free,
        warmup=batch_sizes(recipe).checked(ranks),
    )
    return RunPlan(recipe, layout, batch, pipeline)


def _most_rows(recipe: Recipe) -> int:
    training = recipe.training
    if training.micro_batch_tokens is None:
        assert training.micro_batch_size is not None, "a rule requires one of them"
        return training.micro_batch_size
    # As many of the longest rows fit; a step of shorter rows needs fewer microbatches.
    return max(1, training.micro_batch_tokens // (recipe.data.max_length * (recipe.task.texts_per_row or 1)))


def _pipeline(recipe: Recipe, share: int) -> tuple[int, PipelinePlan]:
    """Return the number of passes through the pipeline in one optimizer step, and the plan of one pass.

    Args:
        share: The rows of one rank in one optimizer step.
    """
    keys, most = recipe.parallel.pipeline, _most_rows(recipe)
    schedule = SCHEDULES[keys.schedule]
    stages_per_rank = keys.stages_per_rank or schedule.stages_per_rank
    num_stages = keys.stages * stages_per_rank
    least, multiple = num_stages if schedule.fills else 1, keys.stages if schedule.several_stages else 1
    # From the first multiple that fills the pipeline, to one row in each microbatch.
    fitting = range(multiple * math.ceil(least / multiple), share + 1, multiple)
    wanted = keys.microbatches or max(math.ceil(share / most), min(share, 2 * num_stages))
    below, above = [count for count in fitting if count <= wanted], [count for count in fitting if count >= wanted]
    near = below[-1:] + above[:1]
    # A number of the recipe is kept or refused. The default becomes the next number that fits.
    count = wanted if keys.microbatches else max(near, default=wanted)
    if count not in fitting:
        rules = [f"at least the {num_stages} stages"] * (count < least or not fitting)
        rules += [f"a multiple of the {multiple} ranks of the pipeline"] * (count % multiple > 0)
        rules = [f"{' and '.join(rules)} for the schedule {schedule.name}"] if rules else []
        rules += [f"at most the {share} rows that a rank has in one optimizer step"] * (count > share or not fitting)
        remedy = " or ".join(map(str, near)) or "gpipe, more rows in `training.global_batch_size`, or fewer stages"
        raise RecipeError(
            f"`parallel.pipeline.microbatches` must be {' and '.join(rules)}, but is {count}; use {remedy}"
        )
    # More rows than the microbatches of one pass may have need further passes.
    num_passes = math.ceil(share / (count * most))
    return num_passes, PipelinePlan(schedule, keys.stages, stages_per_rank, count)
