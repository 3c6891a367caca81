"""The native engine with pipeline stages, in which a pipeline schedule runs the backward pass.

The rest is as without stages. The loss is divided by the valid labels of the global batch. Dropout masks depend on rows
and not on microbatches. Gradients are summed, never averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn

from trainer.engine.accumulation import Schedule
from trainer.engine.forward import ModelForward, prepare_model
from trainer.engine.joint import JointLosses, joint_losses
from trainer.engine.native import NativeEngine
from trainer.engine.precision import COMPUTE_DTYPES, sent_dtype
from trainer.engine.rounded_weights import RoundedWeights, rounded_weights
from trainer.engine.sharded import shard_built
from trainer.models.attention import padding_known
from trainer.models.place import PlacedModel
from trainer.models.stage_split import StagePart
from trainer.parallel.copying import to_device
from trainer.parallel.dropout import MicrobatchKey
from trainer.parallel.gradients import OverlappedSums, TiedGradients, groups_of_experts, round_gradients_
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.microbatch import Microbatch, RankBatch, has_padding, hidden_positions, text_rows
from trainer.parallel.pipeline.busy_clock import BusyClock
from trainer.parallel.pipeline.stage_schedule import PipelineDriver, Shapes
from trainer.parallel.placement import PIPELINE_AXIS, Placements
from trainer.recipe.plan import PipelinePlan, RunPlan
from trainer.tasks.task import Task

_ROWS = "microbatch_rows"  # sent with the inputs: the indices of the rows, which key dropout
_HIDDEN = "microbatch_hidden"  # stays on the host: the positions of padding, so that full rows need no mask
_COUNTED = "microbatch_counted"  # sent with the inputs: 1 for tokens and 0 for padding, also of rows that fill up
_LABELS = "microbatch_labels"  # sent with the inputs, for the scores and for a head that works in chunks of tokens


@dataclass(frozen=True)
class Pass:
    """The rows of one pass through the pipeline, in microbatches of `rows_of_each` rows.

    The first `num_rows` rows are real; repetitions of the last row fill the microbatches.
    """

    inputs: dict[str, Tensor]
    labels: Tensor
    rows: Tensor
    num_rows: int
    rows_of_each: int

    def real_rows(self, microbatch: int) -> slice:
        start = microbatch * self.rows_of_each
        return slice(min(start, self.num_rows), min(start + self.rows_of_each, self.num_rows))


def passes_of(microbatches: Sequence[Microbatch], num_passes: int, num_microbatches: int) -> list[Pass]:
    """Return the passes with the rows of one rank and step, all padded to one length.

    Args:
        microbatches: this rank's microbatches. Fillers are dropped, except that one is kept if there is no other.
    """
    # The schedule needs the same number of passes on all ranks, so a rank without rows sends a filler through.
    real = [microbatch for microbatch in microbatches if not microbatch.filler]
    source = real or list(microbatches[:1])
    inputs = {name: torch.cat([m.inputs[name] for m in source]) for name in source[0].inputs}
    labels, rows = torch.cat([m.labels for m in source]), torch.cat([m.rows for m in source])
    num_rows = len(rows) if real else 0
    # All microbatches of a step have one size, because a schedule fixes the shapes that stages receive.
    size = ceil(max(num_rows, 1) / (num_passes * num_microbatches))
    passes = []
    for index in range(num_passes):
        start = index * num_microbatches * size
        # The last row again fills the rest; `loss` below cuts these rows off.
        places = torch.arange(start, start + num_microbatches * size).clamp(max=len(rows) - 1)
        passes.append(
            Pass(
                {name: tensor[places] for name, tensor in inputs.items()},
                labels[places],
                rows[places],
                # Later passes of a short batch have no real rows at all.
                num_rows=min(max(num_rows - start, 0), num_microbatches * size),
                rows_of_each=size,
            )
        )
    return passes


class PipelinedForward(ModelForward):
    """The forward and backward passes of this rank's stages."""

    def __init__(
        self,
        built: Sequence[PlacedModel],
        task: Task,
        mesh: ParallelMesh,
        plan: RunPlan,
        rounded: RoundedWeights | None = None,
    ) -> None:
        first = built[0]
        super().__init__(first, task, mesh, plan, rounded=rounded)
        assert plan.pipeline is not None
        self._built, self.models = built, [stage.model for stage in built]
        self._origins = [stage.origin for stage in built if stage.origin]
        self._compiled = [stage.compiled for stage in built if stage.compiled]
        self._batch = plan.batch
        self._pipeline: PipelinePlan = plan.pipeline
        # Weights stored in 16 bits say nothing of the type between layers; the other parameters do.
        types = {p.dtype for p in first.model.parameters() if p.is_floating_point()} - set(COMPUTE_DTYPES.values())
        self._own_type = types.pop() if types else torch.get_default_dtype()
        # Hidden states travel in the type of the products. In fp16, gradients could overflow where one process has them
        # in fp32.
        self._sent_in = torch.bfloat16 if plan.recipe.precision == "bf16" else None
        stages = plan.pipeline.stages_of(mesh.index(PIPELINE_AXIS))
        for stage in built:
            model: Any = stage.model
            # Torch's schedule calls this with the tensors that the stage received, and with the inputs by name.
            model.forward = partial(self._run_stage, stage, _part(stage), model.forward)
        self._driver = PipelineDriver(
            # `built` has the stages of this rank in the order of `stages_of`.
            {index: stage.model for stage, index in zip(built, stages, strict=True)},
            plan.pipeline.num_stages,
            plan.pipeline.schedule.name,
            plan.pipeline.num_microbatches,
            mesh.process_group(PIPELINE_AXIS),
            mesh.device,
            self._sent_in or self._own_type,
        )

    @property
    def busy(self) -> BusyClock:
        """The clock of the seconds in which this rank computes."""
        return self._driver.clock

    def accumulate(self, rows: Pass, denominator: Tensor, scale: Tensor | None) -> Tensor:
        """Run forward and backward of one pass; return this rank's share of the loss, zero without the last stage."""
        labels = to_device(rows.labels, self.mesh.device)
        factor = 1.0 if scale is None else scale

        def loss(logits: Tensor, number: Tensor) -> Tensor:
            microbatch = min(int(number), self._pipeline.num_microbatches - 1)  # in a plan, `number` reads as 1
            real = rows.real_rows(microbatch)
            count = real.stop - real.start
            # Without real rows, too: it may be a collective.
            taught = self._taught_rows(rows, microbatch)
            if count == 0:
                return logits.sum() * 0.0  # its backward pass must run too
            if self._joint is not None:
                places = to_device(rows.rows[real], logits.device)
                # Repeated rows at the end have logits, but no loss.
                return self._joint.sum_of(places, logits[:count]) * factor / denominator
            lesson = None if taught is None else taught[:count]
            self._show(Microbatch({}, labels[real], rows.rows[real]), logits[:count])
            return self._row_losses(logits[:count], labels[real], lesson) * factor / denominator

        # The schedule calls `loss` once for each microbatch, on the rank with the last stage.
        total = self._driver.train(self._inputs(rows), self._shapes(rows), loss)
        self._end_first_pass()
        # The loss of a step is reported without the loss scale.
        return total / factor

    @torch.no_grad()
    def _joint_losses(self, batch: RankBatch) -> JointLosses | None:
        """Return the losses of the global batch on ranks with the last stage, after a pass without gradients."""
        # No collective is left out: the data ranks of one stage all have scores, or all have none.
        if not (scores := self._first_scores(batch)):
            return None
        passes = self.passes(batch.microbatches)
        # The losses need labels and indices of rows, and no inputs.
        real = [Microbatch({}, rows.labels[: rows.num_rows], rows.rows[: rows.num_rows]) for rows in passes]
        parts = [of_pass[: rows.num_rows] for rows, of_pass in zip(passes, scores, strict=True)]
        return joint_losses(self._task, self.mesh, batch.num_rows, real, parts)

    @torch.no_grad()
    def _first_scores(self, batch: RankBatch) -> list[Tensor]:
        """Return the scores of each pass; none on ranks without the last stage."""
        scores = [self._scores_of_pass(rows) for rows in self.passes(batch.microbatches)]
        return [of_pass for of_pass in scores if of_pass is not None]

    def passes(self, microbatches: Sequence[Microbatch]) -> list[Pass]:
        """Return the passes of a step; see `passes_of`."""
        return passes_of(microbatches, self._batch.num_passes, self._batch.microbatches_per_pass)

    def _evaluated(self, microbatch: Microbatch, labelled: bool) -> tuple[Microbatch, Tensor | None]:
        """Return the scores of a microbatch on the rank of the last stage; None on other ranks and for a filler."""
        (rows,) = passes_of([microbatch], 1, self._pipeline.num_microbatches)
        scores = self._scores_of_pass(rows)
        if microbatch.filler or scores is None:
            return microbatch, None
        # The rows that fill the last microbatch are cut off.
        return microbatch.to(self.mesh.device), scores[: len(microbatch.rows)]

    def _scores_of_pass(self, rows: Pass) -> Tensor | None:
        return self._driver.forward(self._inputs(rows), self._shapes(rows))

    def _run_stage(
        self, built: PlacedModel, part: StagePart, forward: Callable[..., Any], *received: Tensor, **inputs: Tensor
    ) -> Any:
        """Run one microbatch, as torch calls it; return the tensors for the next stage, or logits."""
        # These four are no arguments of the model.
        rows, counted = inputs.pop(_ROWS), inputs.pop(_COUNTED, None)
        labels, hidden = inputs.pop(_LABELS, None), inputs.pop(_HIDDEN, None)
        keys = built.dropout_keys
        # Rows travel with their microbatch: 1F1B runs forward passes of others before this one's recomputation.
        key = MicrobatchKey(self._step, text_rows(rows, inputs), mask=inputs.get("attention_mask"))
        # Evaluations draw no masks.
        keyed = keys.use(key) if keys and built.model.training else nullcontext()
        labelled = built.head.use(labels) if built.head and labels is not None else nullcontext()
        known = padding_known(has_padding(hidden))
        inner: AbstractContextManager[object] = nullcontext()
        if self.inner is not None and counted is not None and built.model.training:
            inner = self.inner.running(Microbatch({"attention_mask": counted}, rows, rows))
        with self._watch if built.model.training else nullcontext(), keyed, labelled, known, inner:
            output = part.run(
                forward,
                # Layers between the products expect the type of one process; only the transport is in 16 bits.
                tuple(t.to(self._own_type) for t in received),
                {**self._task.model_inputs(inputs), **self._constants},
            )
        # Only the last stage returns no tuple: its output is the model's.
        if not isinstance(output, tuple):
            return self._task.scores(output, inputs, labels)
        return tuple(tensor.to(self._sent_in or self._own_type) for tensor in output)

    def _inputs(self, rows: Pass) -> dict[str, Tensor]:
        tensors = {**rows.inputs, _ROWS: rows.rows, _LABELS: rows.labels}
        if self.inner is not None:
            tensors[_COUNTED] = rows.inputs["attention_mask"].clone()
            tensors[_COUNTED][rows.num_rows :] = 0
        inputs = {name: to_device(tensor, self.mesh.device) for name, tensor in tensors.items()}
        hidden = hidden_positions(rows.inputs)
        # Kept out of the copy to the device: the host reads it.
        return inputs if hidden is None else {**inputs, _HIDDEN: hidden}

    def _taught_rows(self, rows: Pass, microbatch: int) -> Tensor | None:
        """Return a second model's outputs for a microbatch at the last stage; None: there is none."""
        if self._added_loss is None:
            return None
        # Repeated rows too; `loss` cuts them off.
        start, end = microbatch * rows.rows_of_each, (microbatch + 1) * rows.rows_of_each
        inputs = {name: tensor[start:end] for name, tensor in rows.inputs.items()}
        on_device = {name: to_device(tensor, self.mesh.device) for name, tensor in inputs.items()}
        return self._taught(on_device, has_padding(hidden_positions(inputs)))

    def _shapes(self, rows: Pass) -> Shapes:
        return _part(self._built[0]).shapes.of(rows.inputs, rows.rows_of_each)

    def _set_training(self, mode: bool) -> None:
        for stage in self._built:
            if stage.model.training != mode:
                stage.model.train(mode)


def _part(built: PlacedModel) -> StagePart:
    assert built.stage is not None, "the model is no stage"
    return built.stage


class PipelinedSchedule(Schedule):
    """The passes of one step. Under fsdp and hsdp, torch sums gradients over the ranks in each pass."""

    def __init__(self, forward: PipelinedForward, sums: OverlappedSums | None) -> None:
        super().__init__(sums)
        self._forward = forward
        self._batch = forward.plan.batch
        self._clock = BusyClock(forward.mesh.device)
        self._num_runs = 0

    def run(self, microbatches: Sequence[Microbatch], denominator: Tensor, scale: Tensor | None) -> Tensor:
        """Run all passes; every stage gets the share of the loss."""
        if self._num_runs == 1:  # exclude the first run, which opens connections
            self._clock.reset()
            self._forward.busy.reset()
        self._num_runs += 1
        # Each microbatch of each pass accumulates into the gradients once.
        self._sums.begin(self._batch.num_microbatches)
        total: Tensor = self._clock.run(lambda: self._passes(microbatches, denominator, scale))
        self._sums.finish()  # before anything else changes a gradient
        # Ranks without the last stage have zero, so the sum is a broadcast from the last stage.
        return self._forward.mesh.sum_(total, PIPELINE_AXIS)

    def idle_share(self) -> float | None:
        seconds = self._clock.read()
        return 1.0 - min(1.0, self._forward.busy.read() / seconds) if seconds else None

    def _passes(self, microbatches: Sequence[Microbatch], denominator: Tensor, scale: Tensor | None) -> Tensor:
        # In fp32, the rounding of this sum would depend on the number of passes.
        total = torch.zeros((), device=denominator.device, dtype=torch.float64)
        for rows in self._forward.passes(microbatches):
            # Every rank runs every pass, with or without real rows, or its neighbours would wait for ever.
            total = total + self._forward.accumulate(rows, denominator, scale)
        return total


def build_pipelined(
    built: Sequence[PlacedModel], task: Task, mesh: ParallelMesh, plan: RunPlan, total_steps: int
) -> NativeEngine:
    """Return the engine of `ddp`, `fsdp` and `hsdp` with pipeline stages."""
    assert plan.pipeline is not None
    placements: Placements = {}
    is_sharded, sent_in = plan.strategy.cuts_parameters, sent_dtype(plan.recipe.parallel.communication)
    built = [prepare_model(stage, mesh, plan) for stage in built]
    models = [stage.model for stage in built]
    for stage in built:
        if is_sharded:
            placed = shard_built(stage, mesh, plan)
        else:
            stage.model.to(mesh.device)
            placed = stage.placements
        assert not placements.keys() & placed.keys(), "two stages of a rank have parameters of one name"
        # Labels of copies of one tied weight differ by stage.
        placements |= placed
    # A backward pass that computes gradients of weights later finds them by the products that need them.
    together = not plan.pipeline.schedule.splits_backward
    rounded = None if is_sharded else rounded_weights(models, plan.recipe, together)
    forward = PipelinedForward(built, task, mesh, plan, rounded)
    tied = _tied_gradients(built, placements, mesh, plan)
    named = {name: parameter for model in models for name, parameter in model.named_parameters()}
    parameters = [*named.values()]
    data_group = None if is_sharded else mesh.group("dp")
    sums = None
    if data_group is not None:
        of_experts = groups_of_experts(named, placements, mesh)
        sums = OverlappedSums(parameters, data_group, sent_in, forward.busy.leave_out, of_experts)

    def complete() -> None:
        # One data rank sends nothing, but rounds as several would.
        if sums is None and sent_in is not None and not is_sharded:
            round_gradients_(parameters, sent_in)
        # After the sums over data ranks, so that each copy adds whole gradients.
        tied.sum_()

    return NativeEngine(forward, built, PipelinedSchedule(forward, sums), placements, total_steps, complete)


def _tied_gradients(
    built: Sequence[PlacedModel], placements: Placements, mesh: ParallelMesh, plan: RunPlan
) -> TiedGradients:
    pipeline = plan.pipeline
    assert pipeline is not None
    holders = {name: stages for stage in built for name, stages in _part(stage).holders.items()}
    ranks = {name: tuple(sorted({pipeline.rank_of(s) for s in stages})) for name, stages in holders.items()}
    # To create a group is a collective, so every rank creates all of them, in one order.
    groups = {key: mesh.subgroup(PIPELINE_AXIS, key) for key in sorted(set(ranks.values())) if len(key) > 1}
    copies: dict[str, list[nn.Parameter]] = {}
    for stage in built:
        for label, parameter in stage.model.named_parameters():
            # Frozen copies never change, so they need no sum.
            if placements[label].stages and parameter.requires_grad:
                copies.setdefault(placements[label].name, []).append(parameter)
    return TiedGradients(
        copies, {name: groups.get(ranks[name]) for name in copies}, sent_dtype(plan.recipe.parallel.communication)
    )
