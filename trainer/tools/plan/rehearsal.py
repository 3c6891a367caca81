"""One rank of a large run, rehearsed on fake tensors: the rows, files and messages that its training step needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from trainer.base.errors import UsageError
from trainer.checkpoint.format import WrittenFile, share_name
from trainer.data.order import GlobalOrder
from trainer.data.rank_rows import partition
from trainer.engine.precision import weights_dtype
from trainer.models.place import ModelCut, place_empty, planned_cuts
from trainer.models.save import files_of_weights, writer_of
from trainer.parallel.mesh import AXES, ParallelMesh
from trainer.parallel.shards.boxes import own_share
from trainer.ranks.messages import encode
from trainer.recipe.plan import RunPlan, plan_run
from trainer.recipe.reading.loading import ResolvedRecipe
from trainer.recipe.registered import asked_for
from trainer.tools.plan.counted_reads import count_reads
from trainer.tools.plan.hardware import Devices
from trainer.tools.plan.pipeline_plan import plan_rank
from trainer.tools.plan.recipe_plan import HOST_RESERVED, RecipePlan, rank_as_object, tokens_of
from trainer.tools.plan.shapes import shaped
from trainer.tools.plan.simulated_rank import simulated_mesh
from trainer.tools.plan.simulated_step import planned_model, updated_engine
from trainer.tools.plan.step_plan import StepPlan
from trainer.training.checking import require_described

_USUAL_RANKS = 8  # of a machine
_Numbers = list[list[int]] | None  # of each microbatch


@dataclass(frozen=True)
class StateFiles:
    """The share of a rank in a checkpoint."""

    name: str  # the name of its file
    written: int  # the bytes of the tensors that it writes, and copies to the host before
    tensors: int  # the number of these tensors or parts of them
    read: int  # the bytes of the tensors that it reads to resume
    report: int  # the bytes of its message to rank 0, which names its file
    shapes: int  # the bytes of its tensors' names and shapes, which one of the ranks with the same tensors sends


@dataclass(frozen=True)
class Rehearsal:
    """One rank of a run."""

    plan: RunPlan  # the recipe and its layout
    local_ranks: int  # the number of ranks of each machine
    length: int  # the tokens of each text
    position: Mapping[str, int]  # the index of the rank along each axis
    step: StepPlan  # the memory, communication and arithmetic of its step
    # the places of its rows in the global batch of the first step; None if they depend on the data
    microbatches: list[list[int]] | None
    rows: list[list[int]] | None  # the row ids at these places; None if the number of rows is unknown
    # the bytes that it reads of each file of pretrained weights, at most; None if these are not on this machine
    weights_read: Mapping[str, int] | None
    state: StateFiles  # its share of a checkpoint
    model_files: Mapping[str, int]  # the bytes of each file of the final model that it writes
    num_model_files: int  # the number of files of the final model

    @cached_property
    def planned(self) -> RecipePlan:
        """The plan of the rank's step, on devices without a verdict."""
        return RecipePlan(self.plan, Devices(self.local_ranks, "", 0), self.length, (self.step,))

    @property
    def in_memory(self) -> int:
        """The bytes of checkpoints in memory on its host: its share of two checkpoints, and the copy of another rank's.

        One host keeps no copies.
        """
        return (
            self.planned.num_in_memory
            * self.state.written
            * (2 if self.plan.layout.world_size > self.local_ranks else 1)
        )

    @property
    def host(self) -> Mapping[str, int]:
        """The bytes that the rank needs on its host: at the start, to write a checkpoint, and to write the model.

        Checkpoints in memory stay there from the first one on. One may be written while the disk still gets another.
        """
        stepping = sum(self.step.host.values()) + self.in_memory
        return {
            "start": self.step.loaded + HOST_RESERVED,
            "checkpoint": stepping + self.state.written * (2 if self.in_memory else 1) + HOST_RESERVED,
            "model": stepping + max(self.model_files.values(), default=0) + HOST_RESERVED,
        }


def rehearse(
    resolved: ResolvedRecipe,
    ranks: int,
    rank: int = 0,
    local_ranks: int | None = None,
    length: int | None = None,
    rows: int | None = None,
) -> Rehearsal:
    """Build one rank of a run and take a step with it, without the other ranks, a GPU, data or weights.

    Args:
        local_ranks: the number of ranks of each machine; None: the most up to 8 that divide `ranks`.
        length: the tokens of each text; None: `data.max_length`.
        rows: the rows of an epoch, for the order of the data; None: it is not shown.

    Raises:
        TrainerError: there is no such rank, the recipe cannot be laid out, or its step cannot be planned.
    """
    if not 0 <= rank < ranks:
        raise UsageError(f"`--rank` must be from 0 to {ranks - 1} for `--ranks` {ranks}, but is {rank}")
    local = local_ranks or max(number for number in range(1, _USUAL_RANKS + 1) if ranks % number == 0)
    if ranks % local:
        raise UsageError(f"`--local-ranks` must divide the {ranks} ranks of `--ranks`, but is {local}")
    plan = shaped(plan_run(resolved.recipe, ranks, local))
    require_described(plan)
    tokens = length or tokens_of(plan.recipe)
    # A process group without other ranks: it knows its sizes and indices, and sends nothing.
    with simulated_mesh(plan, rank) as mesh:
        position = {axis: mesh.index(axis) for axis in AXES if mesh.size(axis) > 1}
        data_rank = mesh.index("dp")
        weights_read = _weights_read(plan, mesh, is_reader=rank % local == 0)
    places, first_rows = _microbatches(plan, data_rank, rows)
    files = _model_files(plan)
    own_files = {name: count for number, (name, count) in enumerate(files.items()) if writer_of(number, ranks) == rank}
    return Rehearsal(
        plan, local, tokens, position, plan_rank(plan, rank, tokens), places, first_rows, weights_read,
        _state_files(plan, rank, tokens), own_files, len(files),
    )  # fmt: skip


def _microbatches(plan: RunPlan, data_rank: int, rows: int | None) -> tuple[_Numbers, _Numbers]:
    """Return the rank's places in a global batch, and the rows there in step 1, by microbatch.

    Both are None if they depend on the lengths of the rows; the rows also if their order is not known.
    """
    batch = plan.batch
    if batch.micro_batch_tokens is not None:
        return None, None
    num_rows = min(rows or batch.global_batch_size, batch.global_batch_size)
    chunks = partition(num_rows, data_rank, batch.data_parallel_size, batch.micro_batch_size)
    places = [chunk.places for chunk in chunks if not chunk.filler]
    order = None if rows is None else _first_rows(plan, rows)
    first_rows = None if order is None else [order[own].tolist() for own in places]
    return [own.tolist() for own in places], first_rows


def _first_rows(plan: RunPlan, rows: int) -> Any:
    data = plan.recipe.data
    if data.group_by_length or data.source_weights or asked_for("source", plan.recipe):  # the rows depend on the files
        return None
    return GlobalOrder(rows, None, plan.batch.global_batch_size, plan.recipe.training.seed).batch(0, 0)


def _weights_read(plan: RunPlan, mesh: ParallelMesh, is_reader: bool) -> Mapping[str, int] | None:
    """Return the bytes of each file; a rank that reads for its whole machine needs all of them at most."""
    model = plan.recipe.model
    if model.is_random:
        return {}
    if not any(Path(str(model.name_or_path)).glob("*.safetensors")):
        return None
    is_shared = plan.recipe.parallel.load == "broadcast" and mesh.world_size > 1
    if is_shared and not is_reader:
        return {}
    sums: dict[str, int] = {}
    described = planned_model(plan)
    for cut in [ModelCut()] if is_shared else planned_cuts(plan, mesh):
        for name, count in count_reads(described, cut).items():
            sums[name] = sums.get(name, 0) + count
    return sums


def _state_files(plan: RunPlan, rank: int, length: int) -> StateFiles:
    with updated_engine(plan, rank, length) as (engine, mesh):
        state = engine.state()
        own = list(own_share(state.parts))
        name = share_name(rank, mesh.world_size)
        written = sum(box.view.nbytes for _, box in own)
        # A digest of zeros has the length of a real one.
        report = encode([asdict(WrittenFile(name, written, "0" * 64))])
        shapes = encode({part.name: part.shape for part in state.parts})
        # A rank that resumes reads all that it holds; replicas read the same elements.
        read = sum(box.view.nbytes for part in state.parts for box in part.boxes)
        return StateFiles(name, written, len(own), read, len(report), len(shapes))


def _model_files(plan: RunPlan) -> dict[str, int]:
    recipe = plan.recipe
    files = files_of_weights(place_empty(planned_model(plan)).model, recipe.model.adapter, weights_dtype(recipe)).files
    return {file.name: file.num_bytes for file in files}


def as_object(found: Rehearsal) -> Mapping[str, Any]:
    """Return a rehearsal as JSON values; sizes are bytes."""
    return {
        "layout": str(found.plan.layout),
        "ranks": found.plan.layout.world_size,
        "local_ranks": found.local_ranks,
        "length": found.length,
        "position": found.position,
        **rank_as_object(found.planned, found.step),
        "microbatch_places": found.microbatches,
        "microbatch_rows": found.rows,
        "weights_read": found.weights_read,
        "checkpoint": asdict(found.state),
        "checkpoints_in_memory": found.in_memory,
        "model_files": found.model_files,
        "num_model_files": found.num_model_files,
        "host_needed": found.host,
    }
