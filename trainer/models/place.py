"""Place a model: cut it in place to this rank's part, first to a pipeline stage, then over tensor and context ranks.

The model may be on `meta`. `PlacedModel` describes the result, which `models/fill.py` fills with weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.base.errors import UsageError
from trainer.base.extensions import sole
from trainer.base.text import listed
from trainer.models.describe import ModelDescription
from trainer.models.parameter_rules import ParameterGroups
from trainer.parallel.dropout import DropoutKeys
from trainer.parallel.groups import Group, group_size, index_in_group, planned_group
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.placement import (
    EXPERT_AXIS,
    PIPELINE_AXIS,
    SHARDS_AXIS,
    ParameterPlacement,
    Placements,
    Split,
    whole,
)
from trainer.parallel.row_groups import RowGroups
from trainer.parallel.shards.slices import bounds_of_part, part_of
from trainer.recipe.plan import RunPlan

if TYPE_CHECKING:
    from trainer.models.added_loss import AddedLoss
    from trainer.models.compiled import CompiledLayers
    from trainer.models.stage_split import StagePart
    from trainer.models.token_head import TokenHead
    from trainer.parallel.tensor.cross_entropy import VocabularyCut


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
        # Whole rows around the elements, because files are read by rows.
        return (first // row, -(-last // row)) if first < last else (0, 0)


@dataclass(frozen=True)
class ModelCut:
    """The cut of a model to a pipeline stage, and over tensor and context ranks; by default, it is not cut.

    `sequence` shards the sequences over the tensor ranks, too. `choice` is None without a pipeline. `shard` is the
    share of these parts that this rank loads, before FSDP shards them, and `expert_shard` that of experts; None: all.
    `experts` are the ranks that divide the experts of each layer; None: one rank.
    """

    groups: RowGroups = field(default_factory=RowGroups)
    sequence: bool = False
    choice: StageChoice | None = None
    shard: ShardChoice | None = None
    experts: Group = None
    expert_shard: ShardChoice | None = None

    def group_of(self, split: Split) -> Group:
        """Return the ranks of a split."""
        return self.experts if split.axis == EXPERT_AXIS else self.groups.along(split.axis)

    def share_of(self, placement: ParameterPlacement) -> ShardChoice | None:
        """Return the share of a parameter that this rank loads."""
        return self.expert_shard if EXPERT_AXIS in placement.split_axes else self.shard

    def part(self, tensor: Tensor, placement: ParameterPlacement) -> Tensor:
        """Return this rank's part of a whole parameter, or the parameter itself if it is replicated."""
        for split in placement.splits:
            group = self.group_of(split)
            tensor = part_of(tensor, split, index_in_group(group), group_size(group))
        return tensor


ExpertCut = Callable[[Any, dist.ProcessGroup, Placements], Placements]
"""A registered function that leaves a rank of a group its share of the experts of each layer, in place.

It gets the placements of the model, returns those after the cut, and raises a `UsageError` for an unfit model.
"""


@dataclass(frozen=True)
class Origin:
    """The source of the weights of a placed model."""

    names: Collection[str]  # the parameters that can be read again, in time and memory of their size
    types: Mapping[str, torch.dtype]  # the types of those that are stored in files
    read: Callable[[str], Tensor]  # returns this rank's part of one of them, in fp32, as the model was filled with it


@dataclass(frozen=True)
class PlacedModel:
    """A Hugging Face model, or this rank's part of it.

    `cut_placements` are the placements of its parameters if it was cut over tensor or context ranks, or into stages.
    `stage` is its pipeline stage. `dropout_keys` is None if the recipe chose torch's dropout. `notes` are messages for
    the user about the build. `lacking` are the parameters that the pretrained model does not have.

    If data ranks shard the parameters, these stay on `meta`, and `shards` has this rank's rows of each by name.
    `origin` is None if the weights were loaded whole, or may have changed.
    `groups` are those of the optimizer, of the whole model.
    The engine adds a head that scores tokens, the loss of a second model and the compiled layers, if there are any.
    `watchers` make a `RowWatcher` from each forward pass (`engine/forward.py`), `inner` an `InnerLoss` (`joint.py`).
    """

    model: nn.Module
    cut: ModelCut = ModelCut()
    cut_placements: Placements | None = None
    stage: StagePart | None = None
    dropout_keys: DropoutKeys | None = None
    notes: list[str] = field(default_factory=list)
    lacking: Sequence[str] = ()
    shards: dict[str, Tensor] | None = None
    origin: Origin | None = None
    groups: ParameterGroups = field(default_factory=ParameterGroups)
    head: TokenHead | None = None
    added_loss: AddedLoss | None = None
    compiled: CompiledLayers | None = None
    watchers: list[Callable[[Any], Any]] = field(default_factory=list)
    inner: list[Callable[[Any], Any]] = field(default_factory=list)

    @property
    def placements(self) -> Placements:
        """The placement of each parameter; those of a whole model are derived, because it may still change."""
        return whole(self.model) if self.cut_placements is None else self.cut_placements

    @property
    def vocabulary(self) -> VocabularyCut | None:
        """The cut of the logits over the vocabulary; None if they are whole, or not over a vocabulary."""
        if self.cut_placements is None:
            return None
        from trainer.parallel.tensor.cross_entropy import VocabularyCut
        from trainer.parallel.tensor.linear import ColumnParallelLinear

        # Only a head over a vocabulary is padded.
        heads = [m for m in self.model.modules() if isinstance(m, ColumnParallelLinear) and m.pads]
        assert len(heads) <= 1, f"a model has one head over its vocabulary, not {len(heads)}"
        return VocabularyCut(heads[0].group, heads[0].whole_out_features) if heads else None


def place(
    model: nn.Module,
    cut: ModelCut,
    keys: DropoutKeys | None = None,
    notes: Sequence[str] = (),
    lacking: Sequence[str] = (),
    groups: ParameterGroups = ParameterGroups(),  # noqa: B008  # it is frozen
) -> PlacedModel:
    """Cut `model` in place; for the other arguments see `PlacedModel`.

    Raises:
        UsageError: the model cannot be cut in this way.
    """
    # Stages first: the tensor cut then sees the modules of this stage only.
    stage = _cut_to_stage(model, cut.choice) if cut.choice else None
    placements = None
    if cut.groups != RowGroups():
        from trainer.models.tensor_split import split_model

        placements = split_model(model, cut.groups, cut.sequence)
    if cut.experts is not None:
        divide: ExpertCut = sole("experts")
        placements = divide(model, cut.experts, placements or whole(model))
    if stage is not None and cut.choice is not None:
        # Names in placements become those of the whole model, by which checkpoints know parameters.
        of_part = placements or whole(model)
        placements = {name: _of_stage(placement, stage, cut.choice.stage) for name, placement in of_part.items()}
    return PlacedModel(model, cut, placements, stage, keys, [*notes], lacking, groups=groups)


def place_empty(described: ModelDescription, cut: ModelCut = ModelCut()) -> PlacedModel:  # it is frozen
    """Return the placed model on `meta`; this needs its configuration, and no weights."""
    model, keys = described.on_meta(), described.new_keys()
    described.prepare(model, (), keys)
    placed = place(model, cut, keys, groups=described.groups(model))
    return replace(placed, origin=Origin([name for name, _ in placed.model.named_parameters()], {}, _no_values))


def _no_values(name: str) -> Tensor:
    raise AssertionError(f"{name} has no values")


def _cut_to_stage(model: nn.Module, choice: StageChoice) -> StagePart:
    """Cut a model to its stage; refuse a stage with frozen parameters only.

    torch's pipeline needs the output of each stage to have a gradient, and an optimizer needs a parameter.
    """
    from trainer.models.stage_split import cut_stage, split_stages, trainable_stages

    split = split_stages(model, choice.num_stages, choice.starts, choice.schedule)
    if idle := sorted(set(range(split.num_stages)) - trainable_stages(model, split)):
        raise UsageError(
            f"`parallel.pipeline.stages` is {split.num_stages}, but all parameters of stage {idle[0]}"
            f" ({listed(split.layers_of(idle[0]), 3)}) are frozen; freeze fewer, or use fewer stages"
        )
    return cut_stage(model, split, choice.stage)


def _of_stage(placement: ParameterPlacement, part: StagePart, stage: int) -> ParameterPlacement:
    origin = part.origins.get(placement.name, placement.name)
    # The first stage with a shared parameter has the original: norms and checkpoints leave the copies out.
    holders = part.holders.get(origin, ())
    return replace(placement, name=origin, stages=holders, is_copy=bool(holders) and holders[0] != stage)


def tensor_cut(plan: RunPlan, mesh: ParallelMesh) -> ModelCut:
    """Return the cut of a plan's model over tensor and context ranks, without its pipeline stages."""
    return ModelCut(RowGroups.of(mesh), plan.recipe.parallel.sequence)


def planned_cuts(plan: RunPlan, mesh: ParallelMesh, loads_shards: bool = True) -> list[ModelCut]:
    """Return the cut of each of this rank's models: one for each of its pipeline stages, or one for the whole.

    Args:
        loads_shards: whether a rank loads only its shards of the parameters under FSDP and other engines.
    """
    pipeline, is_flat = plan.pipeline, bool(plan.strategy.package)
    # With tensor or context ranks, another engine cuts the parts itself, and needs them whole.
    is_sharded = loads_shards and plan.strategy.cuts_parameters and not (is_flat and plan.layout.ranks_per_row > 1)
    shard, of_experts = (
        ShardChoice(mesh.index(axis), mesh.size(axis), is_flat) if is_sharded else None
        for axis in (SHARDS_AXIS, "dp_shard")
    )
    experts = mesh.group(EXPERT_AXIS)
    cut = replace(tensor_cut(plan, mesh), shard=shard, experts=experts, expert_shard=of_experts)
    stages = () if pipeline is None else pipeline.stages_of(mesh.index(PIPELINE_AXIS))
    return _with_stages(cut, plan, stages)


def every_cut(plan: RunPlan) -> list[ModelCut]:
    """Return the cuts of the first tensor rank for all pipeline stages, without a process group."""
    experts = planned_group(plan.layout.ep) if plan.layout.ep > 1 else None
    groups = RowGroups.planned(plan.layout.tp, plan.layout.cp)
    cut = ModelCut(groups, plan.recipe.parallel.sequence, experts=experts)
    return _with_stages(cut, plan, range(plan.pipeline.num_stages) if plan.pipeline else ())


def _with_stages(cut: ModelCut, plan: RunPlan, stages: Sequence[int]) -> list[ModelCut]:
    pipeline, keys = plan.pipeline, plan.recipe.parallel.pipeline
    if pipeline is None:
        return [cut]
    starts = None if keys.split is None else tuple(keys.split)
    return [replace(cut, choice=StageChoice(stage, pipeline.num_stages, starts, keys.schedule)) for stage in stages]
