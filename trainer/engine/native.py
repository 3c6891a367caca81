"""The native engine: PyTorch alone, on one process or over the ranks of a strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from trainer.engine.accumulation import Schedule
from trainer.engine.engine import Engine, nothing
from trainer.engine.forward import ModelForward
from trainer.engine.optimizers.parameters import TrainedParameters
from trainer.engine.optimizers.table import build_optimizer
from trainer.engine.precision import sent_dtype
from trainer.engine.results import StepResult
from trainer.engine.state import MODEL_PREFIX, EngineState, StateSource, optimizer_shapes
from trainer.models.place import PlacedModel
from trainer.parallel.copying import begin_to_host
from trainer.parallel.dtypes import at_least_fp32
from trainer.parallel.gradients import partial_axis, sum_partial_gradients_
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.microbatch import RankBatch
from trainer.parallel.norms import clip_factor, global_grad_norm, multiply_gradients_
from trainer.parallel.placement import ROWS_AXIS, Placements
from trainer.parallel.row_groups import RowGroups
from trainer.parallel.shards.boxes import TensorPart, tensor_part
from trainer.parallel.shards.gathering import local_part

if TYPE_CHECKING:
    from trainer.engine.graphs import GraphedSchedule


def _begin_read(numbers: Tensor) -> Callable[[], list[float]]:
    """Begin to copy numbers to the host, and return a function that waits for them, but not for later work."""
    read = begin_to_host({"numbers": numbers})

    def wait() -> list[float]:
        numbers: list[float] = read()["numbers"].tolist()
        return numbers

    return wait


@dataclass
class _BegunStep:
    """A step of which the device may still compute the numbers; `result` has them once they are read and counted."""

    read: Callable[[], list[float]]
    rate: float
    counts: Mapping[str, float]  # the numbers of the optimizer before the update, so that a bad step can be undone
    more: Callable[[], Mapping[str, float]]  # further numbers for the record
    result: StepResult | None = None


class NativeEngine(Engine):
    """One model, one optimizer of torch, one schedule of microbatches.

    `built` is the model, or this rank's pipeline stages. `schedule` has the forward and backward passes of the
    microbatches of a step. `complete` completes the gradients, after those that tensor ranks have in parts are summed.
    For other arguments see `Engine`.
    """

    to_graphs: Callable[[NativeEngine, Callable[[str], object]], GraphedSchedule] | None = None
    """Let this engine capture the passes of later steps as CUDA graphs, and report why one runs eagerly after all."""

    def __init__(
        self,
        forward: ModelForward,
        built: Sequence[PlacedModel],
        schedule: Schedule,
        placements: Placements,
        total_steps: int,
        complete: Callable[[], object] = nothing,
    ) -> None:
        models, recipe = [part.model for part in built], forward.plan.recipe
        trained = TrainedParameters.of(models, recipe, placements, forward.mesh, built[0].groups.rules)
        optimizer = build_optimizer(recipe.optimizer, trained)
        super().__init__(forward, models, optimizer, placements, total_steps)
        self._schedule = schedule
        self._complete = complete
        names = built[0].groups.late
        # parameters without an update before the step `model.unfreeze_at_step`
        self.late = [parameter for name, parameter in self.parameters.items() if placements[name].name in names]
        self._late_until = recipe.model.unfreeze_at_step or 0
        # One order on all ranks: `sum_partial_gradients_` joins the gradients of an axis in one tensor.
        self._placed = [(parameter, placements[name]) for name, parameter in self.parameters.items()]
        self._partial = [(own, placement) for own, placement in self._placed if partial_axis(placement, self._mesh)]
        self._sharded = [module for model in models for module in model.modules() if isinstance(module, FSDPModule)]
        self._sent_in = sent_dtype(recipe.parallel.communication)
        self._last: _BegunStep | None = None

    def begin_step(self, batch: RankBatch, before_update: Callable[[], object] = nothing) -> Callable[[], StepResult]:
        self._hide()
        # Not `item()`: the host would wait for the last step. The tensor changes in place after this step's passes.
        scale = self._scaler.scale if self._scaler else None
        inner, more = self._forward.inner, StepResult.more
        with self._forward.step(self._step, batch, scale):
            share = self._schedule.run(batch.microbatches, self._forward.denominator(batch), scale)
        if inner is not None:
            share, more = inner.finish(share)
        # Begun before the sums of gradients and read after them, so that it adds no wait of its own.
        loss = self._mesh.begin_sum_(share, "dp")
        # Partial gradients of tensor and context ranks first: the norm and the clipping need whole gradients.
        sum_partial_gradients_(self._partial, self._mesh, self._sent_in)
        self._complete()
        # After `_complete`, which refuses parameters without a gradient, and before the norm, which leaves these out.
        if self._step < self._late_until:
            for parameter in self.late:
                parameter.grad = None
        norm = global_grad_norm(self._placed, self._mesh, self._scaler.largest if self._scaler else None)
        # One tensor, so that the host reads once. The gradients, and so their norm, still carry the loss scale.
        numbers = torch.stack([loss().double(), norm] if scale is None else [loss().double(), norm / scale, scale])
        # On its way to the host before the update, which the device then runs while the host reads.
        read = _begin_read(numbers)
        # The host reads and logs the step before while the device computes the passes. The weights are still those of
        # that step, so its reader may raise without a further update.
        before_update()
        self._hide()  # an evaluation there showed other weights
        self._use_changed_weights()
        self._settle()  # the device is past these numbers; the rate depends on the steps that fp16 skipped
        rate = self._learning_rate()
        self._last = step = _BegunStep(read, rate, self.optimizer.scalars(), more)
        # inf and nan times 0 are nan; fewer kernels than `isfinite`
        flag = (numbers * 0.0).sum(dtype=torch.float32).ne_(0.0)
        # Each rank has the same flag, because loss and norm are sums over all ranks.
        self._update(rate, numbers[1], flag)
        if inner is not None:
            inner.updated(flag)
        if self._scaler:
            # After the update, which divides by the scale that the loss was multiplied by.
            self._scaler.update(flag)
        self.optimizer.zero_grad()
        self._step += 1
        return partial(self._result, step)

    def _result(self, step: _BegunStep) -> StepResult:
        """Return the numbers of a step. Both its caller and the next step ask: the first of them reads and counts."""
        if step.result is None:
            # The host waits for the device only here.
            loss, norm, *scale = step.read()
            result = StepResult(loss, norm, step.rate, loss_scale=scale[0] if scale else None, more=step.more)
            if not result.is_finite:
                self.optimizer.count_as(step.counts)
            # If the scaler raises, there is no result: the next step asks again, and raises too.
            step.result = self._scaler.settle(result) if self._scaler else result
        return step.result

    def _settle(self) -> None:
        """Read and count the last step, if its caller has not done so."""
        if self._last is not None:
            self._result(self._last)

    def _update(self, rate: float, norm: Tensor, flag: Tensor) -> None:
        """Clip the gradients and step the optimizer, without a wait; a bad step changes nothing.

        Args:
            norm: the norm of the gradients without the loss scale, a scalar.
            flag: 1.0 in a bad step, else 0.0.
        """
        most = self._recipe.training.max_grad_norm
        factor: Tensor | float = 1.0 if most is None else clip_factor(norm, most)
        if self._scaler:
            # One multiplication unscales and clips.
            factor = factor / self._scaler.scale
        scale = factor if isinstance(factor, Tensor) else None
        if scale is not None and not self.optimizer.scales_gradients:
            multiply_gradients_(self.parameters.values(), scale)
        # Parameters that are offloaded are on the host, which waits for this copy as it does for their gradients.
        device = local_part(next(iter(self.parameters.values()))).device
        self.optimizer.begin(rate, self._step, flag.to(device), scale)
        self.optimizer.step()

    def use(self, schedule: Schedule) -> None:
        """Run later steps by another schedule, which replaces `to_graphs`."""
        self._schedule, self.to_graphs, self.is_captured = schedule, None, True

    def idle_share(self) -> float | None:
        return self._schedule.idle_share()

    def held(self) -> dict[str, Tensor]:
        return {name: local_part(parameter.detach()) for name, parameter in self.parameters.items()}

    def state(self) -> EngineState:
        self._settle()
        # A checkpoint has the counts of skipped steps, which are known once the last step is read.
        return super().state()

    def _use_changed_weights(self) -> None:
        for module in self._sharded:  # FSDP would keep the old values of gathered parameters
            module.reshard()

    def _fill(self, source: StateSource) -> None:
        saved = optimizer_shapes(source)
        for label, parameter in self.parameters.items():
            # Without a step of its own, a parameter has none: it gets no gradient, or is unfrozen later.
            if shapes := saved.get(self.placements[label].name):
                self.optimizer.allocate(parameter, self.placements[label], shapes)
        source.fill(self._parts_of(self.parameters, saved=True))

    def _parts(self, label: str) -> Iterator[TensorPart]:
        parameter, placement = self.parameters[label], self.placements[label]
        yield tensor_part(f"{MODEL_PREFIX}{placement.name}", self._loaded(label), placement, self._mesh)
        yield from self.optimizer.parts(parameter, placement, self._mesh)

    def _whole_weights(self, label: str) -> Tensor:
        return at_least_fp32(self._loaded(label))


def placements_of(built: PlacedModel, mesh: ParallelMesh) -> Placements:
    """Return the placements of a model, which is cut when it is built: autocast and recomputation wrap the parts."""
    assert built.cut.groups != RowGroups() or mesh.size(ROWS_AXIS) == 1, "the model is built in the parts of its mesh"
    return built.placements
