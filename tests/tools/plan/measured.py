"""A measured training step: the peak of torch's allocator, the tensors alive, and the collectives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from tests.helpers.training import tiny_recipe
from trainer.engine.builders import build_engine
from trainer.features.deepspeed.package import linear_restored
from trainer.parallel.mesh import ParallelMesh
from trainer.recipe.plan import plan_run
from trainer.recipe.schema import Recipe
from trainer.tools.plan.ledger import PARAMETERS, Ledger
from trainer.tools.plan.recipe_plan import traffic_by_axis
from trainer.tools.plan.reference import task_and_models
from trainer.tools.plan.shape_batch import blank_batch
from trainer.tools.plan.simulated_step import group_axes, plan_step
from trainer.tools.plan.step_plan import StepPlan

LENGTH = 24
_STEPS = 3  # under the ledger
SMALL_BERT = {
    "model_type": "bert",
    "vocab_size": 1009,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "max_position_embeddings": 64,
}
SHALLOW_BERT = {**SMALL_BERT, "num_hidden_layers": 2}
Traffic = Mapping[tuple[str, str], tuple[int, int]]


@dataclass(frozen=True)
class Measured:
    """The bytes alive before a step, those it needs above them, and its collectives by operation and axis.

    `allocated` is the peak of torch's allocator; it contains buffers that gloo allocates inside of its collectives.
    `alive` is the peak of the ledger over real tensors.
    """

    resident: int
    allocated: int
    alive: int
    traffic: Traffic


def recipe_of(keys: Mapping[str, Any]) -> Recipe:
    """Return a recipe of a small model with dropout, and `keys` in place of its own."""
    sections = {
        "model": {"config": SHALLOW_BERT, "tokenizer": "none"},
        "training": {"max_steps": 4, "global_batch_size": 16, "micro_batch_size": 4},
    }
    return tiny_recipe(**{**sections, **keys})


def planned(keys: Mapping[str, Any], world_size: int, rank: int) -> Measured:
    """Return the plan of a step in the form of a measurement."""
    step = plan_step(plan_run(recipe_of(keys), world_size), rank, LENGTH, cuda=False)
    resident = sum(step.resident.values())
    above = step.peak.num_bytes - resident
    return Measured(resident, above, above, traffic_by_axis(step))


@linear_restored()
def measure(keys: Mapping[str, Any]) -> Measured:
    """Train on this rank: two steps that allocate what stays, three under the ledger, one under torch's profiler.

    A thread of gloo lets go of the tensors of a collective a moment after the collective has ended. That adds to the
    bytes alive by chance, so that the fewest of several steps count.
    """
    recipe = recipe_of(keys)
    plan = plan_run(recipe, dist.get_world_size() if dist.is_initialized() else 1)
    mesh = ParallelMesh(torch.device("cpu"), **plan.layout.sizes)
    task, built = task_and_models(plan, mesh)
    with Ledger() as ledger:
        for part in built:
            ledger.assign([*part.model.parameters(), *part.model.buffers()], PARAMETERS)
        config: Any = built[0].model.config
        engine: Any = build_engine(built, task, mesh, plan, _STEPS + 3)
        batch = blank_batch(recipe, task, config, plan.batch, LENGTH)
        for _ in range(2):
            engine.train_step(batch)
        found = []
        for _ in range(_STEPS):
            ledger.restart()
            resident = ledger.peak.num_bytes
            engine.train_step(batch)
            found.append((resident, ledger.peak.num_bytes))
        resident, alive = map(min, zip(*found, strict=True))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        engine.train_step(batch)
    assert profiler.profiler is not None
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    step = StepPlan(mesh.rank, 0, {}, ledger.peaks, ledger.totals, group_axes(mesh, engine))
    return Measured(resident, most, alive - resident, traffic_by_axis(step))
