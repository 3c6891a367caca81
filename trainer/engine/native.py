"""The native engine: PyTorch alone, on one process, with DistributedDataParallel or with FSDP."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from trainer.base.errors import UsageError
from trainer.engine.accumulation import AccumulationSchedule, Schedule
from trainer.engine.engine import nothing
from trainer.engine.forward import ModelForward, prepare_model
from trainer.engine.graphs import CudaCapture, GraphedSchedule
from trainer.engine.learning_rate import learning_rate
from trainer.engine.optimizers.parameters import TrainedParameters
from trainer.engine.optimizers.table import build_optimizer
from trainer.engine.precision import sent_dtype, stored_in_bf16, written_dtype
from trainer.engine.results import EvalResult, StepResult
from trainer.engine.rounded_weights import RoundedWeights, rounded_weights
from trainer.engine.scaling import LossScaler
from trainer.engine.sharded import defer_all_reduce, shard
from trainer.engine.state import (
    MODEL_PREFIX,
    OPTIMIZER_PREFIX,
    EngineState,
    StateSource,
    buffer_parts,
    optimizer_keys,
    whole_tensors,
)
from trainer.models.building import BuiltModel
from trainer.models.saving import save_model
from trainer.parallel.copying import begin_to_host
from trainer.parallel.dtypes import at_least_fp32
from trainer.parallel.gradients import OverlappedSums, round_gradients_
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.microbatch import Microbatch, RankBatch
from trainer.parallel.norms import clip_factor, global_grad_norm, multiply_gradients_
from trainer.parallel.placement import TENSOR_AXIS, Placements, whole
from trainer.parallel.shards.boxes import TensorPart, tensor_part
from trainer.parallel.shards.gathering import local_part
from trainer.parallel.tensor.partial_gradients import sum_partial_gradients_
from trainer.recipe.plan import RunPlan
from trainer.tasks.task import Task


def _sum_gradients(group: dist.ProcessGroup, sent_in: torch.dtype | None, bucket: Any) -> torch.futures.Future[Tensor]:
    """Sum a bucket over the ranks, as DDP's hook: each rank's loss is already its share of the global mean."""
    buffer: Tensor = bucket.buffer()
    sent = buffer.to(sent_in or buffer.dtype)
    work = dist.all_reduce(sent, group=group, async_op=True)
    assert work is not None
    summed: torch.futures.Future[Tensor] = work.get_future().then(
        lambda _: buffer if sent is buffer else buffer.copy_(sent)
    )
    return summed


def wrap_ddp(
    model: nn.Module, mesh: ParallelMesh, sent_in: torch.dtype | None = None, left_out: Iterable[str] = ()
) -> DistributedDataParallel:
    """Return `model` in DDP, with gradients summed, not averaged, during the backward pass.

    Args:
        model: the model.
        mesh: the ranks.
        sent_in: the type in which gradients are sent; None: their own.
        left_out: the names of parameters with gradients that DDP does not sum.
    """
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, left_out)  # type: ignore[no-untyped-call]
    group = mesh.group("dp")
    # Buffers of transformers' models are constants, such as position ids; torch 2.13 renamed the option.
    options = inspect.signature(DistributedDataParallel).parameters
    sync_buffers = "forward_sync_buffers" if "forward_sync_buffers" in options else "broadcast_buffers"
    wrapped = DistributedDataParallel(
        model,
        device_ids=[mesh.device] if mesh.device.type == "cuda" else None,
        process_group=group,
        gradient_as_bucket_view=True,
        **{sync_buffers: False},  # type: ignore[arg-type]
    )
    # A lambda, because DDP compares a hook's annotations with its own classes, and ours are strings.
    wrapped.register_comm_hook(group, lambda group, bucket: _sum_gradients(group, sent_in, bucket))
    return wrapped


def _begin_read(numbers: Tensor) -> Callable[[], list[float]]:
    """Begin to copy numbers to the host, and return a function that waits for them, but not for later work."""
    read = begin_to_host({"numbers": numbers})

    def wait() -> list[float]:
        found: list[float] = read()["numbers"].tolist()
        return found

    return wait


class NativeEngine:
    """One model, one optimizer, one schedule of microbatches.

    Args:
        forward: the forward pass of the model.
        models: the model, or this rank's pipeline stages, with placed parameters.
        schedule: the forward and backward passes of the microbatches of a step.
        complete: a function that completes the sums of gradients after the schedule.
        rounded: the weights of matrix products in 16 bits; None: autocast rounds them, or nothing does.
        placements: the placement of each parameter, by its name in `models`.
        mesh: the ranks.
        plan: the plan of the run, with precision, optimizer, schedule and clipping.
        total_steps: the last step of the learning rate's schedule.
    """

    def __init__(
        self,
        forward: ModelForward,
        models: Sequence[nn.Module],
        schedule: Schedule,
        placements: Placements,
        mesh: ParallelMesh,
        plan: RunPlan,
        total_steps: int,
        complete: Callable[[], None] | None = None,
        rounded: RoundedWeights | None = None,
    ) -> None:
        self.placements = placements
        self._forward = forward
        self._models = models
        self._sharded = [module for model in models for module in model.modules() if isinstance(module, FSDPModule)]
        self._complete = complete
        self._rounded = rounded
        self._mesh = mesh
        self._recipe = plan.recipe
        self._total_steps = total_steps
        self._sent_in = sent_dtype(plan.recipe.parallel.communication)
        self._step = 0
        self.parameters = {name: p for model in models for name, p in model.named_parameters()}
        trained = TrainedParameters.of(models, plan.recipe, placements, mesh)
        self.optimizer = build_optimizer(plan.recipe.optimizer, trained)
        self._schedule = schedule
        self._settle: Callable[[], object] = nothing  # reads the last step, if that was not done
        self._scaler = LossScaler(mesh.device) if plan.recipe.precision == "fp16" else None
        # Without DDP, as with pipeline stages, no bucket waits for a missing gradient.
        self._needs_all_gradients = (
            plan.recipe.parallel.strategy == "ddp"
            and mesh.size("dp") > 1
            and plan.pipeline is None
            and not plan.recipe.cuda_graphs
        )

    def train_step(self, batch: RankBatch) -> StepResult:
        return self.begin_step(batch)()

    def begin_step(self, batch: RankBatch, before_update: Callable[[], object] = nothing) -> Callable[[], StepResult]:
        self._hide()
        scale = self._scaler.scale if self._scaler else None
        with self._rounded.use() if self._rounded else nullcontext():
            self._forward.begin_step(self._step, batch)
            share = self._schedule.run(batch.microbatches, self._forward.denominator(batch), scale)
        loss = self._mesh.begin_sum_(share, "dp")
        if self._needs_all_gradients:
            self._refuse_unused_parameters()
        placed = [(parameter, self.placements[name]) for name, parameter in self.parameters.items()]
        sum_partial_gradients_(placed, self._mesh, self._sent_in)
        if self._complete is not None:
            self._complete()
        norm = global_grad_norm(placed, self._mesh)
        numbers = torch.stack([loss().double(), norm] if scale is None else [loss().double(), norm / scale, scale])
        read = _begin_read(numbers)
        before_update()
        self._hide()  # an evaluation there showed other weights
        self._free_gathered()
        self._settle()  # the device is past these numbers; the rate depends on the steps that fp16 skipped
        rate = self._learning_rate()
        # The host waits for the device only here.
        self._settle = finish = cache(partial(self._result, read, rate, self.optimizer.scalars()))
        flag = (numbers * 0.0).ne(0.0).any().float()  # fewer kernels than `isfinite`
        self._update(rate, numbers[1], flag)
        if self._scaler:
            self._scaler.update(flag)
        self.optimizer.zero_grad(set_to_none=not self._recipe.cuda_graphs)  # graphs add to the gradients in place
        self._step += 1
        return finish

    def _result(self, read: Callable[[], list[float]], rate: float, counts: Mapping[str, float]) -> StepResult:
        loss, norm, *scale = read()
        result = StepResult(loss, norm, rate, loss_scale=scale[0] if scale else None)
        if not result.is_finite:
            self.optimizer.count_as(counts)
        if self._scaler:
            result = self._scaler.settle(result)
        self._settle = nothing
        return result

    def _update(self, rate: float, norm: Tensor, flag: Tensor) -> None:
        """Clip the gradients and step the optimizer, without a wait; a bad step changes nothing.

        Args:
            rate: the learning rate.
            norm: the norm of the gradients without the loss scale, a scalar.
            flag: 1.0 in a bad step, else 0.0.
        """
        most = self._recipe.training.max_grad_norm
        factor: Tensor | float = 1.0 if most is None else clip_factor(norm, most)
        if self._scaler:
            factor = factor / self._scaler.scale
        if isinstance(factor, Tensor):
            multiply_gradients_(self.parameters.values(), factor)
        # Parameters that are offloaded are on the host, which waits for this copy as it does for their gradients.
        device = local_part(next(iter(self.parameters.values()))).device
        self.optimizer.begin(rate, self._step, found_inf=flag.to(device))
        self.optimizer.step()

    def begin_eval(self, microbatch: Microbatch) -> Callable[[], EvalResult]:
        self._show()
        return self._forward.begin_eval(microbatch)

    def eval_step(self, microbatch: Microbatch) -> EvalResult:
        return self.begin_eval(microbatch)()

    def begin_answer(self, microbatch: Microbatch) -> Callable[[], dict[str, Tensor]]:
        self._show()
        return self._forward.begin_answer(microbatch)

    def answer(self, microbatch: Microbatch) -> dict[str, Tensor]:
        return self.begin_answer(microbatch)()

    def idle_share(self) -> float | None:
        return self._schedule.idle_share()

    def held(self) -> dict[str, Tensor]:
        return {name: local_part(parameter.detach()) for name, parameter in self.parameters.items()}

    def _show(self) -> None:
        if self.optimizer.show():
            self._free_gathered()

    def _hide(self) -> None:
        if self.optimizer.hide():
            self._free_gathered()

    def _free_gathered(self) -> None:
        """Free the gathered parameters of FSDP, which would keep their old values."""
        for module in self._sharded:
            module.reshard()

    def state(self) -> EngineState:
        self._settle()
        self._show()
        own = [label for label in self.parameters if not self.placements[label].is_copy]
        parts = [part for label in own if self._is_saved(label) for part in self._parts(label)]
        return EngineState(
            (*parts, *buffer_parts(self._models, self._mesh)),
            {**(self._scaler.state() if self._scaler else {}), **self.optimizer.scalars()},
            tuple(part for label in own if not self._is_saved(label) for part in self._parts(label)),
        )

    def _is_saved(self, label: str) -> bool:
        return not self._recipe.model.is_partly_frozen or self.parameters[label].requires_grad

    @torch.no_grad()
    def load_state(self, source: StateSource, step: int) -> None:
        for label, parameter in self.parameters.items():
            name = self.placements[label].name
            if keys := optimizer_keys(source, name):
                shapes = {key: source.shapes[f"{OPTIMIZER_PREFIX}{name}.{key}"] for key in keys}
                self.optimizer.allocate(parameter, self.placements[label], shapes)
        source.fill(part for label in self.parameters if self._is_saved(label) for part in self._parts(label))
        if self._scaler:
            self._scaler.load_state(source.scalars)
        self.optimizer.load(source.scalars)
        self._free_gathered()
        self._step = step

    def _parts(self, label: str) -> Iterator[TensorPart]:
        """Yield the parts of a parameter and of its optimizer state."""
        parameter, placement = self.parameters[label], self.placements[label]
        yield tensor_part(f"{MODEL_PREFIX}{placement.name}", parameter.detach(), placement, self._mesh)
        yield from self.optimizer.parts(parameter, placement, self._mesh)

    def export(self, folder: Path) -> None:
        self._show()
        weights = {label: partial(at_least_fp32, parameter.detach()) for label, parameter in self.parameters.items()}
        tensors = whole_tensors(weights, self._models, self.placements, self._mesh)
        save_model(
            self._models[0], folder, tensors, self._mesh, self._recipe.model.adapter, written_dtype(self._recipe)
        )

    def _refuse_unused_parameters(self) -> None:
        """Refuse unused parameters: DDP does not sum the gradients in their bucket, and fails one step too late."""
        unused = [name for name, p in self.parameters.items() if p.requires_grad and p.grad is None]
        if unused:
            raise UsageError(
                f"`parallel.strategy` is {self._recipe.parallel.strategy}, which needs every parameter to take part in"
                f" the loss, but of this model {', '.join(unused[:5])} do not ({len(unused)} in all); train it on one"
                " process"
            )

    def _learning_rate(self) -> float:
        """Return the learning rate of the next step; skipped steps do not count."""
        done = self._step - (self._scaler.skipped_steps if self._scaler else 0)
        return learning_rate(self._recipe.optimizer, self._recipe.schedule, done, self._total_steps)


def build_native(built: BuiltModel, task: Task, mesh: ParallelMesh, plan: RunPlan, total_steps: int) -> NativeEngine:
    """Return the engine of `ddp`, `fsdp` and `hsdp`; one data rank under `ddp` runs the model without a wrapper."""
    model, parallel = built.model, plan.recipe.parallel
    # The model is cut when it is built, so autocast and recomputation wrap the parts.
    assert built.placements is not None or mesh.size(TENSOR_AXIS) == 1, "the model is built in the parts of its mesh"
    placements = whole(model) if built.placements is None else built.placements
    prepare_model(built, mesh, plan)
    sent_in = sent_dtype(parallel.communication)
    complete: Callable[[], None] | None = None
    rounded: RoundedWeights | None = None
    sums: OverlappedSums | None = None
    call: nn.Module = model
    no_sync: Callable[[], AbstractContextManager[None]] = nullcontext
    if plan.strategy.cuts_parameters:
        if parallel.offload == "none" and built.shards is None:
            model.to(mesh.device)
        placements = shard(
            model,
            placements,
            mesh,
            plan.recipe.precision,
            parallel.reshard_after_forward,
            parallel.offload == "parameters",
            built.shards,
            sent_in,
        )
        no_sync = partial(defer_all_reduce, model)
    else:
        model.to(mesh.device)
        rounded = rounded_weights([model], plan.recipe)
        if mesh.size("dp") > 1:
            # DDP has gradients in the type of the weights only, and its hooks do not run in a CUDA graph.
            left_out = dict(model.named_parameters()) if plan.recipe.cuda_graphs else stored_in_bf16(model)
            if left_out:
                sums = OverlappedSums(left_out.values(), mesh.group("dp"), sent_in)
            if any(p.requires_grad and name not in left_out for name, p in model.named_parameters()):
                call = wrapped = wrap_ddp(model, mesh, sent_in, left_out)
                no_sync = wrapped.no_sync
        elif sent_in is not None:
            complete = partial(round_gradients_, list(model.parameters()), sent_in)
    synced = plan.strategy.cuts_parameters
    forward = ModelForward(built, call, model, task, mesh, plan.recipe.training.seed, synced, plan.recipe.data.packing)
    schedule: Schedule = AccumulationSchedule(forward.loss_sum, no_sync, sums)
    if plan.recipe.cuda_graphs:
        if task.rows_depend:
            raise UsageError(
                "`cuda_graphs` is true, but each loss of this task depends on all rows of the batch, and the passes of"
                " a graph see their microbatch only; set it to false"
            )
        # A graph rounds the weights itself, because it reads the memory that it was captured with.
        loss_sum = forward.loss_sum if rounded is None else rounded.used_in(forward.loss_sum)
        rounded = None
        schedule = GraphedSchedule(loss_sum, forward.dropout_table, sums, CudaCapture(mesh.device))
    return NativeEngine(forward, [model], schedule, placements, mesh, plan, total_steps, complete, rounded)
