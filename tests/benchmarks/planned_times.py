"""Predicted and measured step times of small models on this machine: `python -m tests.benchmarks.planned_times`.

It measures the machine as `trainer plan --measure` does, then trains some steps of each layout on one and two CPU ranks
and compares their times with those of the plans. The layouts take turns, and the median of their turns counts. Nothing
else should run on the machine.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers.ranks import RankPool
from tests.helpers.training import TINY_TASKS, tiny_recipe
from trainer.ranks.environment import available_cores
from trainer.recipe.plan import RunPlan, plan_run
from trainer.recipe.schema import Recipe
from trainer.tools.plan.hardware import parse_devices
from trainer.tools.plan.measuring import measure_machine
from trainer.tools.plan.pipeline_plan import plan_steps
from trainer.tools.plan.reference import engine_and_batch, seconds_of_steps
from trainer.tools.plan.timing import step_time

PAGE = Path(__file__).with_suffix(".md")
TURNS = 3
_WARM, _STEPS = 3, 9
LENGTH = 64
ROWS = 16
BERT = {
    "model_type": "bert",
    "vocab_size": 2003,
    "hidden_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 768,
    "max_position_embeddings": LENGTH,
}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 4001,
    "hidden_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 512,
    "max_position_embeddings": LENGTH,
}
_LLAMA = {"model": {"config": LLAMA, "tokenizer": "none"}, "task": TINY_TASKS["causal_lm"].keys}


def _training(micro: int) -> dict[str, Any]:
    return {"max_steps": 4, "global_batch_size": ROWS, "micro_batch_size": micro}


def _keys(micro: int = 8, **keys: Any) -> dict[str, Any]:
    return {"training": _training(micro), **keys}


def _parallel(strategy: str = "ddp", **keys: Any) -> dict[str, Any]:
    return {"parallel": {"strategy": strategy, **keys}}


LAYOUTS: Sequence[tuple[str, int, Mapping[str, Any]]] = [
    ("bert, 1 rank", 1, _keys()),
    ("bert, 1 rank, microbatch 2", 1, _keys(2)),
    ("bert, 1 rank, recomputed", 1, _keys(activation_checkpointing="full")),
    ("bert, 1 rank, bf16", 1, _keys(precision="bf16")),
    ("bert, ddp", 2, _keys(**_parallel())),
    ("bert, ddp, microbatch 2", 2, _keys(2, **_parallel())),
    ("bert, ddp, recomputed", 2, _keys(activation_checkpointing="full", **_parallel())),
    ("bert, fsdp", 2, _keys(**_parallel("fsdp"))),
    ("bert, fsdp, microbatch 2", 2, _keys(2, **_parallel("fsdp"))),
    ("bert, fsdp kept whole", 2, _keys(2, **_parallel("fsdp", reshard_after_forward=False))),
    ("bert, tensor", 2, _keys(**_parallel(tensor=2))),
    ("bert, tensor and sequence", 2, _keys(**_parallel(tensor=2, sequence=True))),
    ("bert, pipeline 1f1b", 2, _keys(4, **_parallel(pipeline={"stages": 2}))),
    ("bert, pipeline gpipe", 2, _keys(4, **_parallel(pipeline={"stages": 2, "schedule": "gpipe"}))),
    ("bert, pipeline interleaved", 2, _keys(4, **_parallel(pipeline={"stages": 2, "schedule": "interleaved_1f1b"}))),
    ("llama, 1 rank", 1, _keys(**_LLAMA)),
    ("llama, 1 rank, microbatch 2", 1, _keys(2, **_LLAMA)),
    ("llama, ddp", 2, _keys(**_LLAMA, **_parallel())),
    ("llama, fsdp", 2, _keys(**_LLAMA, **_parallel("fsdp"))),
    ("llama, fsdp, microbatch 2", 2, _keys(2, **_LLAMA, **_parallel("fsdp"))),
    ("llama, tensor", 2, _keys(**_LLAMA, **_parallel(tensor=2))),
    ("llama, pipeline 1f1b", 2, _keys(4, **_LLAMA, **_parallel(pipeline={"stages": 2}))),
]
"""The name of each layout, its ranks, and the keys of its recipe."""


@dataclass(frozen=True)
class Row:
    """A layout, and the seconds of a step: the middle of the plan's range, its ends, and the measured ones."""

    name: str
    least: float
    likely: float
    most: float
    measured: float


def _recipe(keys: Mapping[str, Any]) -> Recipe:
    return tiny_recipe(**{"model": {"config": BERT, "tokenizer": "none"}, **keys})


def _predicted(plan: RunPlan, file: Path) -> tuple[float, float, float]:
    machine = parse_devices(f"{plan.layout.world_size}x{file}").machine
    assert machine is not None
    found = step_time(plan, plan_steps(plan, LENGTH, cuda=False), machine, LENGTH)
    return found.least, found.likely, found.most


def measured_step(keys: Mapping[str, Any]) -> float:
    """Train on this rank, and return the first quartile of the seconds of a step."""
    number = dist.get_world_size() if dist.is_initialized() else 1
    torch.set_num_threads(max(1, available_cores() // number))
    engine, batch = engine_and_batch(plan_run(_recipe(keys), number), LENGTH, _WARM + _STEPS)
    return statistics.quantiles(seconds_of_steps(engine, batch, _WARM + _STEPS)[_WARM:], n=4)[0]


def measure_layouts() -> dict[str, float]:
    """Return the median of the seconds of a step of each layout."""
    pools = {number: RankPool(number) for number in (1, 2)}
    found: dict[str, list[float]] = defaultdict(list)
    try:
        for _ in range(TURNS):
            for name, number, keys in LAYOUTS:
                found[name].append(max(pools[number].run(measured_step, keys)))
    finally:
        for pool in pools.values():
            pool.close()
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def compare(file: Path, measured: Mapping[str, float]) -> list[Row]:
    """Return the rows of all layouts, for the speeds of a hardware file and the seconds that were measured."""
    rows = []
    for name, number, keys in LAYOUTS:
        seconds = (*_predicted(plan_run(_recipe(keys), number), file), measured[name])
        rows.append(Row(name, *(round(value, 4) for value in seconds)))  # as precise as the table
    return rows


def rank_correlation(rows: Sequence[Row]) -> float:
    """Return Spearman's correlation of predicted and measured times."""
    times = torch.tensor([[row.likely for row in rows], [row.measured for row in rows]])
    return float(torch.corrcoef(times.argsort(dim=1).argsort(dim=1).double())[0, 1])


def regret(rows: Sequence[Row]) -> float:
    """Return how much longer the step of the layout with the shortest plan took than the best one, as a share."""
    chosen = min(rows, key=lambda row: row.likely)
    return chosen.measured / min(row.measured for row in rows) - 1


def page(rows: Sequence[Row]) -> list[str]:
    """Return the table and the summary of `planned_times.md`."""
    lines = ["| layout | planned, ms | range, ms | measured, ms | plan / measured |", "|---|---|---|---|---|"]
    for row in rows:
        ends = f"{1e3 * row.least:.1f} to {1e3 * row.most:.1f}"
        ratio = row.likely / row.measured
        lines.append(f"| {row.name} | {1e3 * row.likely:.1f} | {ends} | {1e3 * row.measured:.1f} | {ratio:.2f} |")
    errors = [abs(row.likely / row.measured - 1) for row in rows]
    inside = sum(row.least <= row.measured <= row.most for row in rows)
    lines += [
        "",
        f"- The rank correlation of planned and measured times is {rank_correlation(rows):.2f}.",
        f"- The median error of a plan is {statistics.median(errors):.0%}; the largest is {max(errors):.0%}.",
        f"- {inside} of {len(rows)} measured times lie in their ranges.",
    ]
    for model in ("bert", "llama"):
        longer = regret([row for row in rows if row.name.startswith(model)])
        lines.append(f"- The layout with the shortest plan of {model} takes {longer:.0%} longer than the fastest one.")
    return lines


def published() -> list[Row]:
    """Return the rows of `planned_times.md`."""
    text = PAGE.read_text(encoding="utf-8").split("| layout | planned, ms |")[1].split("\n\n")[0]
    rows = []
    for line in text.splitlines()[2:]:
        name, likely, ends, measured, _ = (cell.strip() for cell in line.strip("|").split("|"))
        least, most = ends.split(" to ")
        rows.append(Row(name, *(float(value) / 1e3 for value in (least, likely, most, measured))))
    return rows


def main() -> None:
    """Measure, compare and print; a hardware file as an argument replaces the measurement of the machine."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(folder) / "machine.json"
        if len(sys.argv) == 1:
            measure_machine(file)
        print("\n".join(page(compare(file, measure_layouts()))))


if __name__ == "__main__":
    main()
