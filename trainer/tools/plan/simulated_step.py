"""One training step of one rank, without data, weights or other ranks: the engine itself runs on fake tensors."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain
from math import prod
from typing import cast

import torch
from torch import nn

from trainer.base.errors import UsageError
from trainer.base.terminal import quiet
from trainer.engine.builders import build_engine
from trainer.engine.engine import Engine
from trainer.engine.native import NativeEngine
from trainer.engine.optimizers.table import optimizer_class
from trainer.engine.precision import store_in_bf16, weights_dtype
from trainer.models.added_loss import AddedLoss
from trainer.models.configuration import max_positions
from trainer.models.describe import ModelDescription
from trainer.models.families.table import FAMILIES
from trainer.models.fill import is_loaded_whole
from trainer.models.hub_files import one_line
from trainer.models.parameter_rules import ParameterGroups
from trainer.models.place import PlacedModel, place_empty, planned_cuts, tensor_cut
from trainer.parallel.mesh import AXES, ParallelMesh
from trainer.parallel.microbatch import Microbatch, RankBatch, positions
from trainer.parallel.placement import PIPELINE_AXIS, REPLICAS_AXIS, ROWS_AXIS, SHARDS_AXIS, Placements
from trainer.parallel.stored_in_parts import sizes_of_parts
from trainer.recipe.plan import RunPlan
from trainer.recipe.strategies import Offload
from trainer.tasks.registry import build_task
from trainer.tasks.task import Task
from trainer.tools.plan.ledger import (
    BATCH,
    BUFFERS,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    SECOND_MODEL,
    Ledger,
    Peak,
    Totals,
    on_host,
)
from trainer.tools.plan.shape_batch import blank_batch, copied_ahead
from trainer.tools.plan.shortening import Stack, lengthen, shorten, stacks_of
from trainer.tools.plan.simulated_deepspeed import (
    group_of,
    label_zero,
    labelled_deepspeed,
    not_simulated,
    simulated_deepspeed,
)
from trainer.tools.plan.simulated_offload import copies_between_host_and_device
from trainer.tools.plan.simulated_rank import replaced, shapes_only, simulated_mesh
from trainer.tools.plan.step_plan import StepPlan
from trainer.training.describing import describe_model
from trainer.training.row_encoding import with_folder
from trainer.training.second_model import second_model

_MICROBATCHES = 3
FP32_BYTES = 4


def planned_task(plan: RunPlan) -> Task:
    """Return the task of a recipe.

    Classes that only the data knows have the names of their weights, of those of a second model, or else "0" and "1".
    """
    task = with_folder(build_task(plan.recipe.task), plan.recipe)
    names: Sequence[str] = ("0", "1")
    if task.class_names is None and (second := second_model(plan.recipe)):
        names = second.class_names(plan.recipe, task)
    return task.without_data(names)


def planned_model(plan: RunPlan) -> ModelDescription:
    """Describe the model of a recipe for its planned task."""
    return describe_model(plan.recipe, planned_task(plan))


def plan_step(plan: RunPlan, rank: int, length: int, cuda: bool = True, fused: bool = True) -> StepPlan:
    """Run some steps of `rank` on fake tensors, and return the plan of the last, after `model.unfreeze_at_step`.

    The first step makes the state of the optimizer. The second one notes the places in DDP's last buckets. No weights
    are read: the configuration of the model is enough.

    Args:
        cuda: whether the device is a GPU; autocast has other types there than on a CPU.
        fused: whether that GPU runs the project's kernels.

    Raises:
        UsageError: the model's configuration cannot be read, the model cannot be cut like this, or the recipe has a
            part that cannot be simulated.
    """
    with _explained(plan), without_collector(), simulated_mesh(plan, rank) as mesh, simulated_deepspeed(plan):
        whole = _Simulation(plan, planned_task(plan), mesh, length, cuda, fused)
        built = whole.build()
        loaded, saved = _loaded(plan, built), sum(map(_saved, built))
        # Before `unfreeze_at_step` there are fewer states, but gradients without an update: the peak may differ.
        early = replace(whole, early=True).step(whole.build()) if _late(built) else None
        return replace(whole.step(built), loaded=loaded, saved=saved, early=early)


@contextmanager
def without_collector() -> Iterator[None]:
    """Keep Python's collector away, so that tensors in cycles do not end at moments that earlier work decides.

    `gc.collect(0)` in this context looks only at objects made since the last pass, so it is short.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _explained(plan: RunPlan) -> Iterator[None]:
    """Raise errors of a model outside of the table of families, such as one with experts, as errors for the user."""
    try:
        with quiet("torch._subclasses.fake_tensor"):  # it logs the traceback of an error that it raises
            yield
    except RuntimeError as error:
        kind = planned_model(plan).config.model_type
        if kind in FAMILIES:
            raise
        raise UsageError(
            f"`trainer plan` cannot simulate a model of type {kind!r}: {one_line(error).rstrip('.')}; measure a short"
            " run instead, which shows its memory"
        ) from error


def updates_in_batches(plan: RunPlan) -> bool:
    """Return whether the optimizer of a plan updates batches of tensors; it updates all weights in bf16 so."""
    return optimizer_class(plan.recipe.optimizer).updates_in_batches or weights_dtype(plan.recipe) != torch.float32


@dataclass(frozen=True)
class _Simulation:
    plan: RunPlan  # the recipe and its layout
    task: Task
    mesh: ParallelMesh  # the simulated mesh
    length: int  # the tokens of each text
    cuda: bool  # whether the device is a GPU
    fused: bool  # whether that GPU runs the project's kernels
    # the stacks to shorten of each part of the model; None: all layers run
    stacks: Sequence[Sequence[Stack]] | None = None
    updates: bool = True  # whether `run` steps the optimizer
    early: bool = False  # whether the steps are before `model.unfreeze_at_step`

    @property
    def offload(self) -> Offload:
        return self.plan.recipe.parallel.offload if self.cuda else "none"  # on a CPU, the device is the host

    def build(self) -> list[PlacedModel]:
        described = planned_model(self.plan)
        longest = max_positions(described.config)
        if longest is not None and self.length > longest:
            raise UsageError(
                f"a text must have at most the {longest} tokens that the model has positions for, but has"
                f" {self.length}; lower `data.max_length` or `--length`"
            )
        return [place_empty(described, cut) for cut in planned_cuts(self.plan, self.mesh)]

    def step(self, built: Sequence[PlacedModel]) -> StepPlan:
        """Return the plan of a step of all layers."""
        plan = self.plan
        late = _late(built) if self.early else ()
        # DeepSpeed fills buckets of a fixed size, so that its memory is not linear in the number of layers.
        stacks = [[] if plan.strategy.package else stacks_of(part.model, late) for part in built]
        numbers = {stack.number for part in stacks for stack in part}
        # Batches of equal tensors grow with the number of layers, up to a limit.
        is_apart = bool(numbers) and self.offload == "none" and updates_in_batches(plan)
        short = replace(self, stacks=stacks, updates=not is_apart)
        found = short.run(built)
        if numbers:
            longer = {number: short.run(short.build(), number) for number in numbers}
            found = lengthen(found, longer, [stack for part in stacks for stack in part])
        # One update of all layers takes the place of that of the short model, which was left out.
        return found.followed_by(*self.update()) if is_apart else found

    def run(self, built: Sequence[PlacedModel], longer: int | None = None) -> StepPlan:
        """Run some steps, and return the result of the last; see `shorten` for `longer`."""
        with self.opened(built, longer) as (engine, ledger, batch):
            positions(batch.microbatches)  # the loop counts them before a step, which then has them
            # They make the state of the optimizer, which every later step finds.
            for _ in range(_warm_up_steps(self.plan)):
                engine.train_step(_smallest(batch, self.plan))
            _label_model(ledger, engine, built, self.offload)
            share = _share(engine)  # its operations are none of a step
            gc.collect(0)  # cycles of the first step
            ledger.restart()
            resident = dict(ledger.alive)
            with nullcontext() if self.updates else replaced(engine.optimizer, step=lambda *_: None):
                totals = _run(engine, batch, ledger, self.plan, self.task)
            stage, axes = self.mesh.index(PIPELINE_AXIS), group_axes(self.mesh, engine)
            return StepPlan(
                self.mesh.rank, stage, resident, dict(ledger.peaks), totals, axes, held=ledger.held,
                gradients=ledger.most_gradients, host=ledger.most_on_host, share=share,
            )  # fmt: skip

    def update(self) -> tuple[Peak, Totals]:
        built = self.build()
        with self.opened(built) as (engine, ledger, _):
            assert isinstance(engine, NativeEngine)
            in_buckets = ledger.alive.get(GRADIENTS, 0)  # of DDP, which `_fill_gradients` makes again
            _fill_gradients(engine, ledger)
            _step(engine)  # makes the state of the optimizer
            _label_model(ledger, engine, built, self.offload)
            late = _fill_gradients(engine, ledger)
            if not in_buckets:
                late.clear()
            with torch.no_grad():
                ledger.restart()
                _step(engine)
            peak = ledger.peak
            alive = {**peak.by_component, GRADIENTS: peak.by_component.get(GRADIENTS, 0) - in_buckets}
            return Peak(sum(alive.values()), alive, peak.place), ledger.totals

    @contextmanager
    def opened(
        self, built: Sequence[PlacedModel], longer: int | None = None
    ) -> Iterator[tuple[Engine, Ledger, RankBatch]]:
        plan, task = self.plan, self.task
        splits = self.offload != "none"
        stacks = self.stacks or [[] for _ in built]
        copies_ahead = self.cuda and plan.copies_ahead
        with (
            shapes_only(self.cuda, self.fused, plan.recipe.precision != "fp32"),
            nullcontext(blank_batch(plan.recipe, task, built[0].model.config, plan.batch, self.length)) as rows,
            Ledger(answers=True, splits=splits) as ledger,
            labelled_deepspeed(ledger, plan),
            copies_between_host_and_device(ledger, plan) if splits else nullcontext(),
        ):
            batch = copied_ahead(rows, ledger) if copies_ahead else rows
            # Before layers go, because the rules of groups have the names of all.
            before = _origins(built)
            for part, own in zip(built, stacks, strict=True):
                ledger.name_modules(shorten(part.model, own, longer))
            groups = _shortened_groups(built, before, self.early)
            built = [replace(part, groups=groups, cut_placements=_present(part)) for part in built]
            for part in built:
                _allocate(part.model)
                if weights_dtype(plan.recipe) == torch.bfloat16:  # before hooks fix the type of the gradients
                    store_in_bf16(part)
                ledger.follow_gradients(part.model)
            with ledger.creating(GRADIENTS):  # the buckets of DDP
                # Kernels that a compiler would fuse are counted one by one.
                change: dict[str, object] = {"compile": False}
                if self.early:
                    change["model"] = plan.recipe.model.model_copy(update={"unfreeze_at_step": sys.maxsize})
                simulated = replace(plan, recipe=plan.recipe.model_copy(update=change))
                added_loss = _added_loss(plan, task, self.mesh, ledger)
                # The number of steps shapes the learning rate only, which changes no size.
                engine = build_engine(built, task, self.mesh, simulated, 2, added_loss)
            if not (plan.strategy.package or isinstance(engine, NativeEngine)):
                raise not_simulated(plan)
            _label_model(ledger, engine, built, self.offload)
            if not copies_ahead:
                ledger.assign(chain.from_iterable(m.tensors for m in batch.microbatches), BATCH)
            yield engine, ledger, batch


def _origins(built: Sequence[PlacedModel]) -> dict[nn.Parameter, str]:
    """Return the name of each parameter in the whole model."""
    return {
        parameter: placements[name].name
        for model, placements in ((part.model, part.placements) for part in built)
        for name, parameter in model.named_parameters()
    }


def _present(part: PlacedModel) -> Placements | None:
    """Return the placements of the parameters that a cut and shortened model still has."""
    if part.cut_placements is None:
        return None
    return {name: part.placements[name] for name, _ in part.model.named_parameters()}


def _late(built: Sequence[PlacedModel]) -> set[nn.Parameter]:
    """Return the parameters without an update before the step `model.unfreeze_at_step`."""
    return {parameter for parameter, name in _origins(built).items() if name in built[0].groups.late}


def _shortened_groups(built: Sequence[PlacedModel], before: Mapping[nn.Parameter, str], early: bool) -> ParameterGroups:
    """Return the groups of models that were shortened, by the names that their parameters have now.

    Args:
        before: the names in the whole model before, by which the present groups are.
        early: whether late parameters have no update.
    """
    groups = built[0].groups
    names = {before[parameter]: now for parameter, now in _origins(built).items()}
    rules = {now: groups.rules[name] for name, now in names.items() if groups.rules}
    late = frozenset(now for name, now in names.items() if early and name in groups.late)
    return ParameterGroups(rules, late=late)


def _added_loss(plan: RunPlan, task: Task, mesh: ParallelMesh, ledger: Ledger) -> AddedLoss | None:
    second = second_model(plan.recipe)
    if second is None or not second.is_needed(plan, mesh):
        return None
    built = place_empty(second.describe(plan.recipe, task), tensor_cut(plan, mesh))
    with ledger.creating(SECOND_MODEL):
        _allocate(built.model)
        added = second.place(built, plan, mesh, task)
    ledger.assign([*added.model.parameters(), *added.model.buffers()], SECOND_MODEL)
    return added


def _loaded(plan: RunPlan, built: Sequence[PlacedModel]) -> int:
    """Return the bytes of the weights that a rank builds on the host: its shard, but not if ZeRO-3 has tensor ranks.

    If it cannot read parts of the weights, it holds the whole model before it cuts its last part.
    """
    if is_loaded_whole(plan.recipe.model, built[-1].model):
        return sum(map(_weights, [planned_model(plan).on_meta(), *(part.model for part in built[:-1])]))
    divided = Counter[int]()  # bytes by the number of ranks that load shares of them
    for part in built:
        placements = part.placements
        for name, parameter in part.model.named_parameters():
            share = part.cut.share_of(placements[name])
            divided[share.size if share else 1] += parameter.nbytes
    return sum(-(-num_bytes // size) for size, num_bytes in divided.items())


def _weights(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def _share(engine: Engine) -> int:
    """Return the bytes of a rank's share of a checkpoint, on average over the ranks that divide the same state."""
    with torch.no_grad():  # else each local part is a view for autograd, which is slow to simulate
        parts = engine.state().parts
        engine.optimizer.hide()  # the state of a step has no weights for evaluations
    return sum(box.view.nbytes // part.num_replicas for part in parts for box in part.boxes)


def _saved(built: PlacedModel) -> int:
    quantized = sizes_of_parts([built.model])
    saved = {name: p for name, p in built.placements.items() if not p.is_copy}
    return sum(quantized.get(name, prod(p.shape)) for name, p in saved.items()) * FP32_BYTES


@contextmanager
def updated_engine(plan: RunPlan, rank: int, length: int) -> Iterator[tuple[Engine, ParallelMesh]]:
    """Open the engine of a rank with all its layers and the state of its optimizer, and its mesh; see `plan_step`."""
    with without_collector(), simulated_mesh(plan, rank) as mesh, simulated_deepspeed(plan):
        simulation = _Simulation(plan, planned_task(plan), mesh, length, cuda=True, fused=True)
        with simulation.opened(simulation.build()) as (engine, ledger, batch):
            if not isinstance(engine, NativeEngine):
                engine.train_step(_smallest(batch, plan))
            else:  # the update alone makes the state, from any gradients
                _fill_gradients(engine, ledger)
                _step(engine)
            yield engine, mesh


def _fill_gradients(engine: NativeEngine, ledger: Ledger) -> list[torch.Tensor]:
    """Set the gradients before an update, and return those without one, which DDP keeps in its buckets."""
    unused, late = [], set(engine.late)
    for parameter in engine.parameters.values():
        if parameter.requires_grad:
            gradient = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
            ledger.assign([gradient], GRADIENTS)
            if parameter in late:
                unused.append(gradient)
            else:
                parameter.grad = gradient
    # Every update of a run has this flag, and optimizers copy their old numbers only if there is one.
    engine.optimizer.found_inf = torch.zeros(())
    return unused


def _step(engine: NativeEngine) -> None:
    engine.optimizer.step()
    engine.optimizer.zero_grad()


def _warm_up_steps(plan: RunPlan) -> int:
    """Return the number of steps after which all are alike: one for the optimizer, one for the buckets of DDP."""
    recipe, is_ddp = plan.recipe, plan.strategy.name == "ddp" and plan.pipeline is None
    in_buckets = is_ddp and plan.layout.data_parallel_size > 1 and recipe.cuda_graphs is not True
    return 2 if in_buckets and recipe.precision != "fp32" else 1


def _run(engine: Engine, batch: RankBatch, ledger: Ledger, plan: RunPlan, task: Task) -> Totals:
    """Run a step, and return its totals.

    Of many microbatches without a pipeline, three run: the first, the last, and one that stands for all others.
    """
    number = len(batch.microbatches)
    if plan.pipeline is not None or task.rows_depend or number <= _MICROBATCHES:
        engine.train_step(batch)
        return ledger.totals
    few = _Divided([*batch.microbatches[: _MICROBATCHES - 1], batch.microbatches[-1]], ledger)
    engine.train_step(replace(batch, microbatches=few))
    # The totals before the third microbatch begins are those of the second.
    repeated = few.parts[-1]  # counted from the second microbatch to the third: the one in the middle
    return reduce(Totals.plus, few.parts, ledger.totals).plus(repeated, number - _MICROBATCHES)


class _Divided(list[Microbatch]):
    """Microbatches that divide the totals of a step: `parts` gets those before each of them."""

    def __init__(self, microbatches: Iterable[Microbatch], ledger: Ledger) -> None:
        super().__init__(microbatches)
        self._ledger = ledger
        self.parts: list[Totals] = []

    def __iter__(self) -> Iterator[Microbatch]:
        for microbatch in super().__iter__():
            self.parts.append(self._ledger.restart_totals())
            yield microbatch


def _smallest(batch: RankBatch, plan: RunPlan) -> RankBatch:
    """Return the batch with the fewest microbatches that make all that stays.

    A schedule of stages needs all; DeepSpeed's offload makes buffers in the second one.
    """
    few = 2 if plan.strategy.package else 1
    return batch if plan.pipeline is not None else replace(batch, microbatches=batch.microbatches[-few:])


def _allocate(model: nn.Module) -> None:
    """Give the tensors of a model on the meta device memory; tied ones stay tied, unlike under `to_empty`."""
    made: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if parameter not in made:
                    # A fake tensor: it has a shape and no memory.
                    made[parameter] = nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad)
                module._parameters[name] = cast(nn.Parameter, made[parameter])
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = made.setdefault(buffer, torch.empty_like(buffer, device="cpu"))


def _label_model(ledger: Ledger, engine: Engine, built: Sequence[PlacedModel], offload: Offload) -> None:
    """Count the tensors of an engine that stay between two steps to their components; `offload` is on the host."""
    parameters = on_host(PARAMETERS) if offload == "parameters" else PARAMETERS
    optimizer = on_host(OPTIMIZER) if offload != "none" else OPTIMIZER
    ledger.assign((buffer for part in built for buffer in part.model.buffers()), BUFFERS)
    ledger.assign(engine.held().values(), parameters)
    values = (value for state in engine.optimizer.state.values() for value in state.values())
    ledger.assign((value for value in values if isinstance(value, torch.Tensor)), optimizer)
    # One for all microbatches, unlike other tensors made outside of modules.
    ledger.assign(engine.optimizer.tables, optimizer)
    if not isinstance(engine, NativeEngine):
        label_zero(ledger, engine, offload)


def group_axes(mesh: ParallelMesh, engine: Engine) -> dict[str, str]:
    """Return the axis of each process group, by its name; a joint axis may share the group of its only part."""
    # Later names win where axes share a group: a part replaces the axis of rows, and `dp` replaces its only part.
    names = (ROWS_AXIS, REPLICAS_AXIS, SHARDS_AXIS, *AXES, "dp")
    axes = {str(mesh.process_group(axis).group_name): axis for axis in names if mesh.size(axis) > 1}
    return axes if isinstance(engine, NativeEngine) else axes | {group_of(engine): "dp"}
