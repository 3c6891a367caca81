"""The section `parallel`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from trainer.recipe.schedules import SCHEDULE_NAMES, SCHEDULES
from trainer.recipe.schema.fields import Duration, DurationField, Name
from trainer.recipe.schema.section import Contradiction, Section, clash
from trainer.recipe.strategies import STRATEGIES


class Pipeline(Section):
    """Pipeline parallelism: groups of ranks hold consecutive layers as stages."""

    stages: Annotated[int, Field(ge=1)] = 1
    """Pipeline-parallel degree: ranks over which the layers are split."""
    schedule: Literal[SCHEDULE_NAMES] = "1f1b"  # type: ignore[valid-type]  # from the table
    """Order in which the stages process the microbatches."""
    microbatches: Annotated[int, Field(ge=1)] | None = None
    """Microbatches in one pass; null: all of a step, at least two per stage if rows suffice."""
    stages_per_rank: Annotated[int, Field(ge=1)] | None = None
    """Stages on each rank; null: the default of the schedule."""
    split: Annotated[list[Name], Field(min_length=1)] | None = None
    """First layer of each later stage, by its name in the base model; null: balanced by cost."""

    def contradictions(self) -> Iterator[Contradiction]:
        stages = "parallel.pipeline.stages"
        if self.stages == 1:
            for key in self.changed(*type(self).model_fields):
                text = f"applies to a pipeline, but `{stages}` is 1; increase it, or remove this key"
                yield clash(text, f"parallel.pipeline.{key}", stages)
            return
        number = self.stages * (self.stages_per_rank or SCHEDULES[self.schedule].stages_per_rank)
        if self.split is not None and len(self.split) != number - 1:
            rule = f"must name the first layer of each of the {number} stages except the first"
            text = f"{rule}, but has {len(self.split)} names instead of {number - 1}"
            yield clash(text, "parallel.pipeline.split", stages)


class Communication(Section):
    """Types of the numbers that ranks send each other."""

    gradients: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Type in which gradients are summed over ranks; 16 bits halve their traffic."""


class Parallel(Section):
    """Distribution of the training over ranks; does not change the result beyond rounding."""

    strategy: Literal[tuple(STRATEGIES)] = "ddp"  # type: ignore[valid-type]  # from the table
    """Placement of parameters, gradients and optimizer state over the data-parallel ranks."""
    shard: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """Ranks in one shard group under hsdp; auto: the ranks of one node."""
    tensor: Annotated[int, Field(ge=1)] = 1
    """Tensor-parallel degree: ranks that shard each large matrix and process the same rows."""
    sequence: bool = False
    """Sequence parallelism: shard positions over tensor ranks between the matrices of a layer, for less memory."""
    pipeline: Pipeline = Pipeline()
    """Pipeline stages and their schedule."""
    reshard_after_forward: bool = True
    """Under fsdp and hsdp: free gathered layers after the forward pass, and gather them again."""
    offload: Literal["none", "optimizer", "parameters"] = "none"
    """Keep the optimizer state, or parameters and optimizer state, in CPU memory."""
    load: Literal["read", "broadcast"] = "read"
    """read: every rank reads its parts of pretrained weights; broadcast: one rank of each node reads for the others,
    for a slow shared file system."""
    communication: Communication = Communication()
    """Types of the numbers that ranks send each other. Weights and hidden states of matrix products always travel in
    the type of `precision`."""
    stall_timeout: DurationField = Duration(10, "minute")
    """Maximum time without progress; then the run ends and reports each rank."""
    join_timeout: DurationField = Duration(10, "minute")
    """Maximum time of the rendezvous."""

    def contradictions(self) -> Iterator[Contradiction]:
        yield from self.pipeline.contradictions()
