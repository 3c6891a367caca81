"""The model whole on every data rank: in DistributedDataParallel, or without a wrapper on one rank."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainer.base.errors import UsageError
from trainer.base.internals import Internals
from trainer.engine.accumulation import AccumulationSchedule, Schedule
from trainer.engine.engine import nothing
from trainer.engine.forward import ModelForward, prepare_model
from trainer.engine.native import NativeEngine, placements_of
from trainer.engine.precision import sent_dtype, stored_in_bf16
from trainer.models.place import PlacedModel
from trainer.parallel.gradients import OverlappedSums, groups_of_experts, partial_axis, round_gradients_
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.microbatch import Microbatch
from trainer.recipe.plan import RunPlan
from trainer.tasks.task import Task

if TYPE_CHECKING:
    from trainer.engine.graphs import GraphedSchedule
    from trainer.engine.rounded_weights import RoundedWeights

INTERNALS = Internals(
    "torch",
    "2.11 to 2.13",
    {  # the one way to leave out parameters that need gradients
        "torch.nn.parallel:DistributedDataParallel": ["_set_params_and_buffers_to_ignore_for_model"]
    },
)


def _sum_gradients(group: dist.ProcessGroup, sent_in: torch.dtype | None, bucket: Any) -> torch.futures.Future[Tensor]:
    """Sum a bucket over the ranks, as a hook of DDP."""
    buffer: Tensor = bucket.buffer()
    # Not averaged, as by default: each rank's loss is already its share of the global mean.
    sent = buffer.to(sent_in or buffer.dtype)
    work = dist.all_reduce(sent, group=group, async_op=True)
    assert work is not None
    summed: torch.futures.Future[Tensor] = work.get_future().then(
        # DDP reads the sum from the bucket's buffer, because parameters' gradients are views of it.
        lambda _: buffer if sent is buffer else buffer.copy_(sent)
    )
    return summed


class GradientPlaces:
    """The places of gradients in DDP's buckets, into which a backward pass may write them without a copy by DDP."""

    def __init__(self) -> None:
        self._views: dict[Tensor, Tensor] = {}
        self._known: set[int] = set()  # the buckets with known places
        self._is_first = True

    def noted(self, bucket: Any) -> Any:
        """Note the places in a bucket, and return it. DDP makes new buckets once, after its first sum."""
        if self._is_first:
            self._is_first = not bucket.is_last()
        elif bucket.index() not in self._known:
            self._known.add(bucket.index())
            self._views.update(zip(bucket.parameters(), bucket.gradients(), strict=True))
        return bucket

    def of(self, parameter: Tensor) -> Tensor | None:
        """Return the place of a gradient; None if it is unknown, or has the sum of earlier passes."""
        place = self._views.get(parameter) if parameter.grad is None else None
        return None if place is None else place.detach()  # autograd takes over a tensor that nobody else holds

    def forget(self) -> None:
        """Forget all places, before DDP is dropped."""
        self._views.clear()


def wrap_ddp(
    model: nn.Module,
    mesh: ParallelMesh,
    sent_in: torch.dtype | None = None,
    left_out: Iterable[str] = (),
    places: GradientPlaces | None = None,
) -> DistributedDataParallel:
    """Return `model` in DDP, with gradients summed, not averaged, during the backward pass.

    Args:
        sent_in: the type in which gradients are sent; None: their own.
        left_out: the names of parameters with gradients that DDP does not sum.
        places: learns the places of gradients.
    """
    INTERNALS.require("`parallel.strategy` ddp", "use fsdp")
    # DDP reads this list from the model when it is built, so it must be set before.
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, left_out)  # type: ignore[no-untyped-call]
    group = mesh.group("dp")
    # Buffers of transformers' models are constants, such as position ids; torch 2.13 renamed the option.
    options = inspect.signature(DistributedDataParallel).parameters
    sync_buffers = "forward_sync_buffers" if "forward_sync_buffers" in options else "broadcast_buffers"
    wrapped = DistributedDataParallel(
        model,
        device_ids=[mesh.device] if mesh.device.type == "cuda" else None,
        process_group=group,
        # Gradients are views of the buckets, which saves a copy of each and the memory of a second gradient.
        gradient_as_bucket_view=True,
        init_sync=mesh.traits.has_peers,  # it compares the weights of all ranks
        **{sync_buffers: False},  # type: ignore[arg-type]
    )
    noted = places or GradientPlaces()
    # A lambda, because DDP compares a hook's annotations with its own classes, and ours are strings.
    wrapped.register_comm_hook(group, lambda group, bucket: _sum_gradients(group, sent_in, noted.noted(bucket)))
    return wrapped


def _refuse_unused_parameters(parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse unused parameters: DDP does not sum the gradients in their bucket, and fails one step too late."""
    unused = [name for name, p in parameters.items() if p.requires_grad and p.grad is None]
    if unused:
        raise UsageError(
            "`parallel.strategy` is ddp, which needs every parameter to take part in the loss, but of this model"
            f" {', '.join(unused[:5])} do not ({len(unused)} in all); train it on one process"
        )


def _refuse_dependent_rows(task: Task) -> None:
    if task.rows_depend:
        raise UsageError(
            "`cuda_graphs` is true, but each loss of this task depends on all rows of the batch, and the passes of a"
            " graph see their microbatch only; set it to false"
        )


@dataclass(frozen=True)
class _Graphs:
    """The passes of a model as CUDA graphs, from the first step or from a later one on."""

    forward: ModelForward
    loss_sum: Callable[[Microbatch], Tensor]
    rounded: RoundedWeights | None
    task: Task
    parameters: Mapping[str, nn.Parameter]
    sent_in: torch.dtype | None

    def schedule(self, report: Callable[[str], object] | None = None) -> GraphedSchedule:
        """Return the schedule, which sums the gradients itself; for `report` see `GraphedSchedule`."""
        from trainer.engine.graphs import CudaCapture, CutSums, EagerReplay, GraphedSchedule

        _refuse_dependent_rows(self.task)
        mesh, parameters = self.forward.mesh, self.parameters.values()
        # A graph rounds the weights itself, because it reads the memory that it was captured with.
        loss_sum = self.loss_sum if self.rounded is None else self.rounded.used_in(self.loss_sum)
        capture = CudaCapture(mesh.device) if mesh.traits.captures_graphs else EagerReplay()
        sums = CutSums(() if mesh.size("dp") == 1 else parameters, mesh.group("dp"), self.sent_in)
        table, is_compiled = self.forward.dropout_table, self.forward.plan.recipe.compile
        return GraphedSchedule(loss_sum, parameters, table, capture, sums, report, is_compiled)

    def replace(self, places: GradientPlaces, engine: NativeEngine, report: Callable[[str], object]) -> GraphedSchedule:
        """Let the engine run later steps by this schedule, without DDP."""
        places.forget()
        self.forward.call_model(_around_graphs(self.rounded))
        schedule = self.schedule(report)
        engine.use(schedule)
        gc.collect()  # the hooks of DDP leave the gradients with it
        return schedule


def _around_graphs(rounded: RoundedWeights | None) -> RoundedWeights | None:
    """Return the rounded weights for a step of graphs, which round them inside, or read current copies."""
    if rounded is None:
        return None
    from trainer.engine.rounded_weights import CurrentCopies

    return CurrentCopies(rounded)


def _adds_no_gradients(plan: RunPlan) -> bool:
    """Return whether each step has one microbatch, so that each pass writes gradients and none adds to them."""
    return plan.batch.num_microbatches == 1 and plan.batch.micro_batch_tokens is None


def _leave_gradients_rounded(
    rounded: RoundedWeights | None, engine: NativeEngine, mesh: ParallelMesh, plan: RunPlan
) -> None:
    """Leave gradients in 16 bits that nobody adds to and that a kernel, which also clips, reads."""
    sent_in = sent_dtype(plan.recipe.parallel.communication)
    is_written_once = mesh.size("dp") == 1 and _adds_no_gradients(plan) and sent_in in (None, torch.bfloat16)
    if rounded is not None and is_written_once and engine.optimizer.scales_gradients:
        placements = engine.placements  # sums of partial gradients are in fp32
        rounded.leave(p for name, p in engine.parameters.items() if partial_axis(placements[name], mesh) is None)


def build_ddp(built: PlacedModel, task: Task, mesh: ParallelMesh, plan: RunPlan, total_steps: int) -> NativeEngine:
    """Return the engine of `ddp`; one data rank runs the model without a wrapper.

    Raises:
        UsageError: CUDA graphs cannot be captured for the task or on the device.
    """
    model, recipe, is_alone = built.model, plan.recipe, mesh.size("dp") == 1
    sent_in = sent_dtype(recipe.parallel.communication)
    built = prepare_model(built, mesh, plan)
    model.to(mesh.device)
    places = GradientPlaces()
    rounded: RoundedWeights | None = None
    if recipe.precision != "fp32":
        from trainer.engine.rounded_weights import rounded_weights

        rounded = rounded_weights([model], recipe, place_of=places.of)
    named = dict(model.named_parameters())
    # DDP has gradients in the type of the weights only, and its hooks do not run in a CUDA graph.
    is_captured = recipe.cuda_graphs is True
    of_experts = groups_of_experts(named, built.placements, mesh)
    left_out = {} if is_alone else named if is_captured else stored_in_bf16(model)
    left_out = left_out | {name: p for name, p in named.items() if p in of_experts}
    call: nn.Module = model
    no_sync: Callable[[], AbstractContextManager[None]] = nullcontext
    complete: Callable[[], object] = nothing
    if is_alone:
        if sent_in is not None:
            # No rank receives these gradients, but one process must round as several ranks do.
            complete = partial(round_gradients_, list(named.values()), sent_in)
    else:
        if not is_captured:
            complete = partial(_refuse_unused_parameters, named)
        # DDP refuses a model without any gradient to sum.
        if any(p.requires_grad and name not in left_out for name, p in named.items()):
            call = wrapped = wrap_ddp(model, mesh, sent_in, left_out, places)
            no_sync = wrapped.no_sync
    around = _around_graphs(rounded) if is_captured else rounded
    forward = ModelForward(built, task, mesh, plan, call, rounded=around)
    # Which weights have one use is known from the first graph only; see `RoundedWeights.learn`.
    loss_sum: Callable[[Microbatch], Tensor] = forward.loss_sum
    if rounded is not None:
        from trainer.engine.rounded_weights import learning

        loss_sum = learning(model, loss_sum, rounded.learn)
    graphs = _Graphs(forward, loss_sum, rounded, task, named, sent_in)
    schedule: Schedule
    if is_captured:
        schedule = graphs.schedule()
    else:
        sums = OverlappedSums(left_out.values(), mesh.group("dp"), sent_in, others=of_experts)
        schedule = AccumulationSchedule(loss_sum, no_sync, sums)
    engine = NativeEngine(forward, [built], schedule, placements_of(built, mesh), total_steps, complete)
    _leave_gradients_rounded(rounded, engine, mesh, plan)
    if (
        not is_captured and not built.watchers and not (forward.inner and forward.inner.adds)
    ):  # a captured pass shows nothing
        engine.to_graphs = partial(graphs.replace, places)
    return engine
