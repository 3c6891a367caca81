"""Small trainings on the CPUs of this machine: the seconds of their steps and of each of their operations."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

from trainer.base.heap import keep_freed_memory
from trainer.engine.builders import build_engine
from trainer.engine.engine import Engine
from trainer.models.fill import build_model
from trainer.models.place import PlacedModel, planned_cuts
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.microbatch import RankBatch
from trainer.recipe.plan import RunPlan, plan_run
from trainer.recipe.schema import Recipe
from trainer.tasks.task import Task
from trainer.tools.plan.shape_batch import blank_batch
from trainer.tools.plan.simulated_step import planned_model, planned_task
from trainer.tools.plan.timing import SHARDS, STAGES, SUMS, TENSOR
from trainer.tools.plan.work import Amount, Kind, work_of

_WARM, _STEPS, _TIMED = 2, 7, 5
_SIZES = ((128, 2, 32), (320, 2, 96))  # hidden size, layers, tokens of a text


def task_and_models(plan: RunPlan, mesh: ParallelMesh) -> tuple[Task, list[PlacedModel]]:
    """Return the planned task and the model of this rank, or its stages, with weights and without data."""
    described = planned_model(plan)
    return planned_task(plan), [build_model(described, cut) for cut in planned_cuts(plan, mesh)]


def engine_and_batch(plan: RunPlan, length: int, steps: int) -> tuple[Engine, RankBatch]:
    """Return the engine of this rank on its CPU with random weights, and a batch without data."""
    # As in a run on CPUs, so that allocations cost the same.
    keep_freed_memory()
    mesh = ParallelMesh(torch.device("cpu"), **plan.layout.sizes)
    task, built = task_and_models(plan, mesh)
    batch = blank_batch(plan.recipe, task, built[0].model.config, plan.batch, length)
    return build_engine(built, task, mesh, plan, steps), batch


def seconds_of_steps(engine: Engine, batch: RankBatch, number: int) -> list[float]:
    """Train for some steps, which all ranks begin together, and return the seconds of each."""
    found = []
    for _ in range(number):
        if dist.is_initialized():
            # Ranks begin together; otherwise, waiting for a late one would count as work.
            dist.barrier()
        start = time.perf_counter()
        engine.train_step(batch)
        found.append(time.perf_counter() - start)
    return found


@dataclass(frozen=True)
class Training:
    """A training by the keys of its recipe, and the tokens of a text."""

    keys: Mapping[str, Any]
    length: int

    def plan(self, ranks: int) -> RunPlan:
        """Return the plan of the training on a number of ranks."""
        return plan_run(Recipe.model_validate(self.keys), ranks)


def _training(family: str, size: tuple[int, int, int], **keys: Any) -> Training:
    hidden, layers, length = size
    config: dict[str, Any] = {
        "model_type": family,
        "vocab_size": 1000,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "intermediate_size": 4 * hidden if family == "bert" else 3 * hidden,
        "max_position_embeddings": length,
    }
    task = {"type": "causal_lm", "text": "text"}
    if family == "bert":
        task = {"type": "sequence_classification", "text": "text", "label": "label"}
    recipe = {
        "name": "reference",
        "task": task,
        "model": {"config": config, "tokenizer": "none"},
        "data": {"source": "files", "train": "none"},
        "training": {"max_steps": 1000, "global_batch_size": 16, "micro_batch_size": 4},
        "optimizer": {"name": "adamw", "learning_rate": 1e-4},
    }
    return Training({**recipe, **keys}, length)


def of_operations() -> list[Training]:
    """Return trainings of one rank that measure operations."""
    return [
        _training(family, size, precision=precision)
        for family in ("bert", "llama")
        for size in _SIZES
        for precision in ("fp32", "bf16")
    ]


def of_strategies() -> list[tuple[str, Training]]:
    """Return trainings of two ranks, each with the kind of collectives that it measures.

    A kind comes after those that its steps contain, too.
    """
    layouts: dict[str, dict[str, Any]] = {
        SUMS: {"strategy": "ddp"},
        SHARDS: {"strategy": "fsdp"},
        TENSOR: {"tensor": 2},
        STAGES: {"pipeline": {"stages": 2}},
    }
    return [(kind, _training("bert", size, parallel=keys)) for kind, keys in layouts.items() for size in _SIZES]


def _seconds_of_step(engine: Engine, batch: RankBatch) -> float:
    """Train for some steps, and return the first quartile of the seconds of a step."""
    return statistics.quantiles(seconds_of_steps(engine, batch, _WARM + _STEPS)[_WARM:], n=4)[0]


def seconds_of(training: Training, ranks: int) -> float:
    """Train on this rank and all others, and return the first quartile of the seconds of a step."""
    engine, batch = engine_and_batch(training.plan(ranks), training.length, 1000)
    return _seconds_of_step(engine, batch)


@dataclass(frozen=True)
class Operation:
    """An operation of a step: its kind, its work and its seconds."""

    kind: Kind
    amount: Amount
    seconds: float

    @property
    def size(self) -> int:
        """The floating-point operations, or the bytes if it has none."""
        return self.amount.flops or self.amount.num_bytes


class _Stopwatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Measures each operation below autograd."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Operation] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # it comes back with the tensors that it wraps
        start = time.perf_counter()
        result = function(*args, **kwargs)
        seconds = time.perf_counter() - start
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        kind, amount = work_of("", function, args, kwargs, inputs, outputs, result)
        self.found.append(Operation(kind, amount, seconds))
        return result


def operations_of(training: Training) -> tuple[float, Sequence[Operation]]:
    """Train on this rank alone, and return the first quartile of the seconds of a step, and the operations of a step.

    The operations are those of one step, so that their seconds have the same pauses as each other: of the step at the
    first quartile, so that their sum compares with the seconds of a step.
    """
    engine, batch = engine_and_batch(training.plan(1), training.length, 1000)
    seconds = _seconds_of_step(engine, batch)
    steps = []
    for _ in range(_TIMED):
        with _Stopwatch() as watch:
            engine.train_step(batch)
        steps.append(watch.found)
    return seconds, sorted(steps, key=lambda step: sum(one.seconds for one in step))[_TIMED // 4]
