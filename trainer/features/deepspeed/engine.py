"""ZeRO-1, 2 and 3 (Rajbhandari et al. 2020, arXiv:1910.02054) with DeepSpeed's engine.

Autocast, loss scaling and the accumulation boundary are the trainer's own. Partitioning, communication, clipping and
the optimizer step are DeepSpeed's.

In bf16 and fp16, the weights of matrix products are gathered in 16 bits: in stage 3 before each use, in stages 1 and 2
after the optimizer step. Autocast rounds them anyway, so this changes no result. Biases are gathered with the norms.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainer.base.errors import UsageError
from trainer.engine.engine import Engine, nothing
from trainer.engine.forward import ModelForward, prepare_model
from trainer.engine.optimizers.base import EngineOptimizer
from trainer.engine.optimizers.parameters import TrainedParameters
from trainer.engine.optimizers.table import build_optimizer
from trainer.engine.precision import COMPUTE_DTYPES, sent_dtype
from trainer.engine.products import rounded_by_autocast
from trainer.engine.results import StepResult
from trainer.engine.state import MODEL_PREFIX, OPTIMIZER_PREFIX, EngineState, StateSource, optimizer_shapes
from trainer.features.deepspeed import internals
from trainer.features.deepspeed.configuration import deepspeed_config
from trainer.features.deepspeed.package import ready_deepspeed
from trainer.models.names import move_buffers
from trainer.models.place import PlacedModel
from trainer.parallel.gradients import partial_axis
from trainer.parallel.mesh import DATA_AXES, ParallelMesh
from trainer.parallel.microbatch import RankBatch
from trainer.parallel.norms import largest_element
from trainer.parallel.placement import CONTEXT_AXIS, ROWS_AXIS, TENSOR_AXIS, Placements, Split
from trainer.parallel.shards.boxes import TensorPart, flat_part, tensor_part, whole_part
from trainer.recipe.plan import RunPlan
from trainer.tasks.task import Task

_STEP = "step"
"""The key of the count of steps in an optimizer's state; DeepSpeed flattens all other tensors as the weights."""


class MeshTopology:
    """The mesh as DeepSpeed's `mpu` (the interface of Megatron-LM's `parallel_state`)."""

    def __init__(self, mesh: ParallelMesh) -> None:
        # `tensor_model` is the spelling of newer versions of Megatron-LM, and DeepSpeed asks for both.
        for words, axis in (("model", ROWS_AXIS), ("tensor_model", ROWS_AXIS), ("data", "dp")):
            setattr(self, f"get_{words}_parallel_rank", partial(mesh.index, axis))
            setattr(self, f"get_{words}_parallel_world_size", partial(mesh.size, axis))
            setattr(self, f"get_{words}_parallel_group", partial(mesh.process_group, axis))


class ZeroEngine(Engine):
    """The engine of a model in DeepSpeed.

    `engine` is that of `deepspeed.initialize`, which steps `optimizer`; for other arguments see `Engine`.
    """

    def __init__(
        self,
        forward: ModelForward,
        engine: Any,
        optimizer: EngineOptimizer,
        placements: Placements,
        total_steps: int,
    ) -> None:
        super().__init__(forward, [engine.module], optimizer, placements, total_steps)
        self._engine = engine
        self._shapes = {name: internals.shape_of(p, p.shape) for name, p in self.parameters.items()}
        self._is_partitioned = forward.plan.strategy.cuts_parameters  # stage 3

    def begin_step(self, batch: RankBatch, before_update: Callable[[], object] = nothing) -> Callable[[], StepResult]:
        # Weights are still those of the last step, as the interface promises.
        before_update()  # now, because DeepSpeed's own step waits for the device
        self._hide()
        # DeepSpeed takes a number, so the host waits here.
        scale = self._scaler.scale.item() if self._scaler else None
        if scale is not None:
            # DeepSpeed multiplies the loss by scale / N, and `_accumulate` by N; then DeepSpeed's average divides by N.
            # With scale * N instead, many ranks would overflow fp16.
            self._engine.optimizer.override_loss_scale(scale / self._mesh.size("dp"))
        with self._forward.step(self._step, batch):
            loss = self._accumulate(batch)
        rate = self._learning_rate()
        # `settle` has counted the skipped steps of all earlier steps, because this engine reads each at once.
        self.optimizer.begin(rate, self._step)
        zero = self._engine.optimizer
        overflows = self._scaler is not None and self._overflows(self._scaler.largest)
        skipped = internals.infinite_norm(zero) if overflows else nullcontext()
        gathers = nullcontext() if self._is_partitioned else internals.updates_gathered_rounded(zero)
        # Before the step: the sum is a collective, which all ranks call whether or not the step is skipped.
        whole_loss = self._mesh.begin_sum_(loss, "dp")
        with skipped, gathers, internals.numbers_read_once(zero, whole_loss) as numbers:
            self._engine.step()  # skips a step with a non-finite norm
        self._step += 1
        whole, norm = numbers
        if scale is not None:
            norm = float(self._engine.get_global_grad_norm())  # without the scale
        result = StepResult(whole, norm if norm >= 0.0 else math.inf, rate, loss_scale=scale)
        if self._scaler:
            self._scaler.update(torch.full((), float(not result.is_finite), device=self._mesh.device))
            result = self._scaler.settle(result)
        return lambda: result

    def held(self) -> dict[str, Tensor]:
        held = self._partition if self._is_partitioned else Tensor.detach
        return {name: held(parameter) for name, parameter in self.parameters.items()}

    def state(self) -> EngineState:
        self._link_moments()
        return super().state()

    def _use_changed_weights(self) -> None:
        """Gather the parameters of stages 1 and 2 after a change of the master weights; a collective."""
        if not self._is_partitioned:
            with internals.updates_gathered_rounded(self._engine.optimizer):
                self._engine.optimizer.update_lp_params()
            self._link_moments()

    def _fill(self, source: StateSource) -> None:
        self._prepare_moments(source)
        if self._is_partitioned:
            for name in filter(self._is_saved, self.parameters):
                self._fill_partition(name, source)
        else:
            source.fill(self._parts_of(self.parameters, saved=True))

    def _whole_weights(self, label: str) -> Tensor:
        from deepspeed.utils import safe_get_full_fp32_param

        parameter: Any = self.parameters[label]
        if parameter.requires_grad:
            weights: Tensor = safe_get_full_fp32_param(parameter)
            return weights.reshape(self._shapes[label])
        # DeepSpeed keeps no master weights of a frozen parameter.
        import deepspeed

        with (
            internals.unrounded(parameter),
            deepspeed.zero.GatheredParameters([parameter], enabled=self._is_partitioned),
        ):
            frozen: Tensor = parameter.detach().clone()
            return frozen.reshape(self._shapes[label])

    def _partition(self, parameter: Any) -> Tensor:
        """Return this rank's elements of a parameter of stage 3, without DeepSpeed's undefined padding."""
        partition: Tensor = parameter.ds_tensor.detach()
        return partition[: self._bounds(parameter)[1]]

    def _parts(self, name: str) -> Iterator[TensorPart]:
        """Yield the parts of master weights and moments, and the step count, of a parameter.

        A frozen parameter has its weights only. Stages 1 and 2 do not partition it.
        """
        parameter = self.parameters[name]
        if not parameter.requires_grad:
            if self._is_partitioned:
                yield self._flat_part(name, None, self._partition(parameter), self._bounds(parameter)[0])
            else:
                yield tensor_part(f"{MODEL_PREFIX}{name}", parameter.detach(), self.placements[name], self._mesh)
            return
        for key in (None, *self._moments()):
            flat, start = self._fragment(name, key)
            yield self._flat_part(name, key, flat, start)
        if (count := self._step_count()) is not None:
            yield whole_part(f"{OPTIMIZER_PREFIX}{name}.{_STEP}", count, self._mesh)

    def _flat_part(self, name: str, key: str | None, flat: Tensor, start: int) -> TensorPart:
        label = f"{OPTIMIZER_PREFIX}{name}.{key}" if key else f"{MODEL_PREFIX}{name}"
        return flat_part(label, flat, start, self.placements[name], self._mesh, DATA_AXES)

    def _fragment(self, name: str, key: str | None) -> tuple[Tensor, int]:
        """Return this rank's elements of a master weight (key None) or a moment, without padding, and their start."""
        parameter: Any = self.parameters[name]
        if self._is_partitioned:
            from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state

            flat = safe_get_local_optimizer_state(parameter, key) if key else safe_get_local_fp32_param(parameter)
            start, number = self._bounds(parameter)
            return flat[:number], start
        return internals.fragment(parameter, key)

    def _bounds(self, parameter: Any) -> tuple[int, int]:
        return internals.bounds(parameter, self._mesh.index("dp_shard"))

    def _fill_partition(self, name: str, source: StateSource) -> None:
        """Load this rank's partition of a parameter of stage 3 and of its moments, without communication."""
        from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

        parameter: Any = self.parameters[name]
        start, number = self._bounds(parameter)
        keys = (None, *self._moments()) if parameter.requires_grad else (None,)
        # With the padding at the end, which stays zero: DeepSpeed's partitions have equal sizes on all ranks.
        flats = {key: torch.zeros(parameter.ds_tensor.ds_numel) for key in keys}
        source.fill([self._flat_part(name, key, flat[:number], start) for key, flat in flats.items()])
        for key, flat in flats.items():
            own = flat.to(parameter.ds_tensor.device)
            if key:
                safe_set_local_optimizer_state(parameter, own, key)
            else:
                if parameter.requires_grad:
                    safe_set_local_fp32_param(parameter, own)  # the master weights only
                parameter.ds_tensor.copy_(own)

    def _accumulate(self, batch: RankBatch) -> Tensor:
        """Run forward and backward of each microbatch, and return this rank's share of the loss."""
        denominator = self._forward.denominator(batch)
        total = torch.zeros((), device=self._mesh.device)
        for index, microbatch in enumerate(batch.microbatches):
            # DeepSpeed reduces the gradients of earlier passes too (stages 2 and 3), but steps after the last one only.
            is_last = index == len(batch.microbatches) - 1
            # DeepSpeed counts boundaries by itself otherwise, and expects the same number of microbatches in each step.
            self._engine.set_gradient_accumulation_boundary(is_last)
            loss = self._forward.loss_sum(microbatch) / denominator
            total = total + loss.detach()
            # DeepSpeed checks only the gradient, which may be finite while the loss is not. A factor of NaN in the last
            # pass makes the sum of all gradients non-finite, so all ranks skip the step together.
            taint = torch.where(torch.isfinite(total), 1.0, torch.nan) if is_last else 1.0
            # DeepSpeed averages over the data ranks, and the loss is already this rank's share of the global mean.
            self._engine.backward(loss * taint * self._mesh.size("dp"), scale_wrt_gas=False)
        return total

    def _overflows(self, most: float) -> bool:
        """Return whether an element of the scaled gradient is above `most`, on any rank; a collective."""
        zero, device = self._engine.optimizer, self._mesh.device
        if self._recipe.parallel.offload == "none":
            gradients = internals.averaged_gradients(zero)
        else:
            flats: list[Any] = internals.flat_weights(zero, self._is_partitioned)
            gradients = [flat.grad for flat in flats]
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # DeepSpeed copies them without a wait
        largest = largest_element(gradients, device)
        # Partitions over data ranks, then the parts of tensor ranks: all ranks must skip together.
        for axis in ("dp", ROWS_AXIS):
            largest = self._mesh.max_(largest, axis)
        return largest.item() > most / self._mesh.size("dp")  # averaged over the data ranks, not summed

    def _moments(self) -> list[str]:
        return sorted({key for state in self.optimizer.state.values() for key in state} - {_STEP})

    def _step_count(self) -> Tensor | None:
        return next((state[_STEP].detach().cpu() for state in self.optimizer.state.values() if _STEP in state), None)

    def _link_moments(self) -> None:
        if not self._is_partitioned:
            internals.link_moments(self._engine.optimizer, self.optimizer.state)

    def _prepare_moments(self, source: StateSource) -> None:
        """Allocate the moments of a checkpoint, which DeepSpeed allocates in the first step.

        Raises:
            UsageError: a trained parameter has none.
            ValueError: they are not those of this optimizer.
        """
        saved = optimizer_shapes(source)
        keys = {key for shapes in saved.values() for key in shapes}
        for name, parameter in self.parameters.items() if keys else ():
            if parameter.requires_grad:
                if name not in saved:  # other strategies keep none without a gradient
                    raise UsageError(
                        f"`parallel.strategy` {self._recipe.parallel.strategy} needs a state of the optimizer for each"
                        f" trained parameter, but the checkpoint has none for {name}, which had no gradient; resume"
                        " under the strategy that saved it"
                    )
                self.optimizer.refuse_other_state(parameter, self.placements[name], saved[name])
        for flat in internals.flat_weights(self._engine.optimizer, self._is_partitioned):
            state = {key: torch.zeros_like(flat) for key in sorted(keys - {_STEP})}
            if _STEP in keys:
                state[_STEP] = torch.zeros((), device=flat.device)
                name = next(name for name, parameter in self.parameters.items() if parameter.requires_grad)
                source.fill([whole_part(f"{OPTIMIZER_PREFIX}{name}.{_STEP}", state[_STEP], self._mesh)])
            if state:
                self.optimizer.state[flat] = state
        self._link_moments()


def _gather_rounded(model: nn.Module, dtype: torch.dtype) -> None:
    """Mark the weights of matrix products to be gathered in `dtype`.

    Biases stay in fp32: DeepSpeed's linear layer of stage 3 adds them in fp32, and each type has its own gathers.
    """
    rounded = rounded_by_autocast(model)
    for name, parameter in model.named_parameters():
        if name in rounded and len(internals.shape_of(parameter, parameter.shape)) > 1:
            internals.gather_in(parameter, dtype)


def _sum_while_backward(parameter: nn.Parameter, axis: str, mesh: ParallelMesh, sent_in: torch.dtype | None) -> None:
    """Sum a partial gradient over an axis in each backward pass, during which DeepSpeed consumes it."""

    def summed(gradient: Tensor) -> Tensor:
        # The sum is in place, and autograd may use the incoming gradient elsewhere too.
        sent = gradient.to(sent_in or gradient.dtype, copy=True, memory_format=torch.contiguous_format)
        return mesh.sum_(sent, axis).to(gradient.dtype)

    parameter.register_hook(summed)  # type: ignore[no-untyped-call]


def build_zero(built: PlacedModel, task: Task, mesh: ParallelMesh, plan: RunPlan, total_steps: int) -> ZeroEngine:
    """Return the engine of `zero1`, `zero2` and `zero3`.

    Raises:
        UsageError: DeepSpeed is not installed, or its version lacks a member that this engine uses.
    """
    deepspeed = ready_deepspeed(mesh.device.index)  # not always that of the rank: each may see one GPU only
    internals.INTERNALS.require("`parallel.strategy` zero1, zero2 or zero3", "use fsdp")
    model = built.model
    if plan.strategy.cuts_parameters and mesh.size(ROWS_AXIS) == 1:
        internals.partition(built, mesh, deepspeed_config(plan), deepspeed)
    move_buffers(model, mesh.device)  # DeepSpeed moves no model that is partitioned
    placements = {  # DeepSpeed keeps the shape of a parameter that it has partitioned
        name: replace(placement, shape=internals.shape_of(model.get_parameter(name), placement.shape))
        for name, placement in built.placements.items()
    }
    for name, parameter in model.named_parameters():
        # Context ranks with the same part of a matrix count it once.
        axes = placements[name].split_axes
        is_counted = ROWS_AXIS in axes or (TENSOR_AXIS in axes and mesh.index(CONTEXT_AXIS) == 0)
        internals.count_on_this_rank(parameter, is_counted)
        axis = partial_axis(placements[name], mesh)
        if parameter.requires_grad and axis is not None:
            _sum_while_backward(parameter, axis, mesh, sent_dtype(plan.recipe.parallel.communication))
    built = prepare_model(built, mesh, plan)
    if plan.strategy.cuts_parameters:
        partition = Split(dim=None, axis="dp_shard")
        placements = {name: replace(p, splits=(*p.splits, partition)) for name, p in placements.items()}
    if plan.recipe.precision != "fp32":
        _gather_rounded(model, COMPUTE_DTYPES[plan.recipe.precision])
    trained = TrainedParameters.of([model], plan.recipe, placements, mesh, built.groups.rules)
    optimizer = build_optimizer(plan.recipe.optimizer, trained)
    # Before `initialize`, which flattens each group into one buffer.
    if not plan.strategy.cuts_parameters:  # a group is gathered in one type
        optimizer.divide("is_rounded", internals.is_gathered_rounded)
    with redirect_stdout(io.StringIO()), internals.flattened_in_place():
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            config=deepspeed_config(plan),
            mpu=MeshTopology(mesh) if mesh.size(ROWS_AXIS) > 1 else None,
            dist_init_required=False,
        )
    if plan.strategy.cuts_parameters:
        internals.leave_gathers_unrecorded(engine.optimizer)
    forward = ModelForward(built, task, mesh, plan, engine, engine)
    return ZeroEngine(forward, engine, optimizer, placements, total_steps)
