"""The cut of a model to one rank's part: first to its pipeline stage, then over the tensor ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from torch import Tensor, nn

from trainer.base.errors import UsageError
from trainer.base.text import listed
from trainer.models.stage_split import StagePart, StageSplit, cut_stage, split_stages, trainable_stages
from trainer.models.tensor_split import split_model
from trainer.parallel.communication import Group, group_size, index_in_group
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.placement import TENSOR_AXIS, ParameterPlacement, Placements, whole
from trainer.parallel.shards.slices import bounds_of_part, part_of


@dataclass(frozen=True)
class StageChoice:
    """One stage of a pipeline; `starts` are the first layers of all stages but the first, or None to balance costs."""

    stage: int
    num_stages: int
    starts: tuple[str, ...] | None = None
    schedule: str = "1f1b"


@dataclass(frozen=True)
class ShardChoice:
    """The share of one data rank in every parameter.

    These are rows `index * ceil(rows / size)` and the next ones, as in FSDP. With `flat`, the elements of a parameter
    are divided instead, as in ZeRO-3, and the share has all rows with such elements.
    """

    index: int
    size: int
    flat: bool = False

    def bounds(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the first row of the share in a tensor of this shape, and the row after its last one."""
        num_rows, *columns = shape
        if not self.flat:
            return bounds_of_part(num_rows, self.index, self.size)
        row = prod(columns)
        first, last = bounds_of_part(num_rows * row, self.index, self.size)
        return (first // row, -(-last // row)) if first < last else (0, 0)


@dataclass(frozen=True)
class CutModel:
    """The result of a cut: the placements of the parameters and, with a pipeline, the part of the stage."""

    placements: Placements
    part: StagePart | None = None


@dataclass(frozen=True)
class ModelCut:
    """The cut of a model to a pipeline stage and over the ranks of the tensor axis.

    `group` is None without tensor or context ranks. `sequence` shards the sequences over the tensor ranks, too;
    `context` shards sequences instead of the matrices of layers. `choice` is None without a pipeline. `shard` is the
    share of these parts that this rank loads, before FSDP shards them; None: all.
    """

    group: Group | None
    sequence: bool = False
    context: bool = False
    choice: StageChoice | None = None
    shard: ShardChoice | None = None

    def __call__(self, model: nn.Module) -> CutModel:
        """Cut `model` in place.

        Raises:
            UsageError: the model cannot be cut in this way.
        """
        part = None
        if self.choice is not None:
            split = split_stages(model, self.choice.num_stages, self.choice.starts, self.choice.schedule)
            _refuse_idle_stages(model, split)
            part = cut_stage(model, split, self.choice.stage)
        placements = whole(model) if self.group is None else split_model(model, self.group, self.sequence, self.context)
        if part is not None and self.choice is not None:
            placements = {
                name: _of_stage(placement, part.origins.get(name, name), part, self.choice.stage)
                for name, placement in placements.items()
            }
        return CutModel(placements, part)

    def part(self, tensor: Tensor, placement: ParameterPlacement) -> Tensor:
        """Return this rank's part of a whole parameter, or the parameter itself if it is replicated."""
        for split in placement.splits:
            assert self.group is not None
            tensor = part_of(tensor, split, index_in_group(self.group), group_size(self.group))
        return tensor


def _refuse_idle_stages(model: nn.Module, split: StageSplit) -> None:
    """Refuse a stage with frozen parameters only.

    torch's pipeline needs the output of each stage to have a gradient, and an optimizer needs a parameter.

    Raises:
        UsageError: there is such a stage.
    """
    idle = sorted(set(range(split.num_stages)) - trainable_stages(model, split))
    if idle:
        raise UsageError(
            f"`parallel.pipeline.stages` is {split.num_stages}, but all parameters of stage {idle[0]}"
            f" ({listed(split.layers_of(idle[0]), 3)}) are frozen; freeze fewer, or use fewer stages"
        )


def _of_stage(placement: ParameterPlacement, origin: str, part: StagePart, stage: int) -> ParameterPlacement:
    holders = part.holders.get(origin, ())
    return replace(placement, name=origin, stages=holders, is_copy=bool(holders) and holders[0] != stage)


def model_cuts(
    mesh: ParallelMesh,
    sequence: bool,
    context: bool,
    stages: Sequence[int],
    num_stages: int,
    starts: Sequence[str] | None,
    schedule: str = "1f1b",
    shard: ShardChoice | None = None,
) -> list[ModelCut | None]:
    """Return the cut of each of a rank's stages, or of the whole model; None if nothing is cut.

    Args:
        mesh: the mesh of all ranks.
        sequence: whether tensor ranks shard sequences, too.
        context: whether the ranks of the tensor axis shard sequences instead of the matrices of layers.
        stages: the stages that this rank holds.
        num_stages: the number of stages of the whole pipeline; 1 without a pipeline.
        starts: the first layers of the stages, as in `StageChoice`.
        schedule: the name of the pipeline's schedule.
        shard: the share of the parts that this rank loads; None: all.
    """
    group = mesh.group(TENSOR_AXIS)
    if num_stages == 1:
        return [ModelCut(group, sequence, context, shard=shard) if group is not None or shard is not None else None]
    names = None if starts is None else tuple(starts)
    return [
        ModelCut(group, sequence, context, StageChoice(stage, num_stages, names, schedule), shard) for stage in stages
    ]
