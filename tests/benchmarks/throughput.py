"""Samples per second of our loop and of other tools' loops, on the same batches; `--defaults` adds Trainer's own.

All trainings alternate in the same processes in blocks of steps: other load on the machine affects them equally. The
ratios are medians over the rounds. From the root of the repository:

    python -m tests.benchmarks.throughput --processes 1 2 --rounds 50

`make bench` measures more models, precisions and tasks; its first command writes `bench.json`. Each prints the ratios
that are more than 5 % below the stored ones in `docs/throughput.json`, and never fails because of one. `--store` stores
them, and `python -m docs.generate` writes the tables of `docs/benchmarks.md` from them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product, repeat
from pathlib import Path
from typing import Any

import torch.distributed as dist

from docs.generate import with_spread
from tests.benchmarks.contestants import ours, peer, trainer_by_default
from tests.benchmarks.peers import name_ranks
from tests.benchmarks.setting import MODELS, TASKS, Setting, benchmark_recipe
from tests.benchmarks.turns import Contestant, Cost
from tests.helpers.ranks import RankPool
from trainer.features.masked_lm.section import MaskedLM
from trainer.parallel.microbatch import RankBatch
from trainer.ranks.environment import LaunchEnvironment
from trainer.recipe.schema import Recipe

BASELINE = "PyTorch by hand"
COMPILED = "PyTorch by hand, compiled"
TORCHS_DROPOUT = "ours, torch's dropout"
BY_DEFAULT = "transformers' Trainer, defaults"
OURS = {"ours": [], TORCHS_DROPOUT: ["training.layout_invariant_dropout=false"]}
SHARDED = {"ours, fsdp": ["parallel.strategy=fsdp"], "ours, zero1": ["parallel.strategy=zero1"]}
FURTHER = {
    "without padding": ["data.padding_free=true"],
    "compiled": ["compile=true"],
    "rows in random order": ["data.group_by_length=false"],
    "rows in random order, without padding": ["data.group_by_length=false", "data.padding_free=true"],
}
"""The keys of our trainings beside those of the setting: always, on several processes, and on request."""

Figures = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""The figures by setting (model, precision and processes), training and name; ratios have their quartiles."""

STORED = Path(__file__).parents[2] / "docs" / "throughput.json"
_LEAST_SHARE = 0.95


@dataclass(frozen=True)
class Round:
    """One block of steps of each training: the samples of all ranks, and the cost on this rank by training."""

    samples: int
    costs: dict[str, Cost]


def _contestants(recipes: Mapping[str, Recipe], world_size: int, by_default: bool) -> list[Contestant]:
    settings = {name: Setting.of(recipe, world_size) for name, recipe in recipes.items()}
    torchs = settings[TORCHS_DROPOUT]
    ready = list(torchs.batches())
    # Our loop prepares batches while it trains; the others get prepared batches.
    found = [
        Contestant(BASELINE, partial(peer, "pytorch", torchs), ready),
        *(Contestant(name, partial(ours, one), one.batches()) for name, one in settings.items()),
        Contestant("transformers' Trainer", partial(peer, "transformers", torchs), ready),
        Contestant("accelerate", partial(peer, "accelerate", torchs), ready),
    ]
    if any(recipe.compile for recipe in recipes.values()):
        found.append(Contestant(COMPILED, partial(peer, "compiled", torchs), ready))
    if world_size > 1:
        found.append(Contestant("DeepSpeed, ZeRO-1", partial(peer, "deepspeed", torchs), ready))
        if not isinstance(torchs.recipe.task, MaskedLM):  # accelerate shards the tied bias twice, and fails
            found.append(Contestant("accelerate, FSDP2", partial(peer, "accelerate_fsdp2", torchs), ready))
    if by_default:
        found.append(Contestant(BY_DEFAULT, partial(trainer_by_default, torchs), repeat(RankBatch([], 0, 0))))
    return found


def compete(
    recipes: Mapping[str, Recipe], num_rounds: int, num_steps: int, warm_up: int = 1, by_default: bool = False
) -> list[Round]:
    """Run the rounds on this rank. All ranks must call it.

    Args:
        recipes: the recipes of our trainings, by name.
        num_rounds: the rounds to return.
        num_steps: the steps of a training in a round.
        warm_up: the rounds before them, which are not returned.
        by_default: whether transformers' Trainer also trains with its own batches, in random order.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    name_ranks(LaunchEnvironment("none", rank=rank, local_rank=rank, world_size=ranks, local_world_size=ranks))
    contestants = _contestants(recipes, ranks, by_default)
    rounds = []
    for number in range(warm_up + num_rounds):
        costs = {}
        for contestant in _rotated(contestants, number):
            dist.barrier()
            costs[contestant.name] = contestant.block(num_steps)
        in_order = {contestant.name: costs[contestant.name] for contestant in contestants}
        rounds.append(Round(num_steps * recipes[TORCHS_DROPOUT].training.global_batch_size, in_order))
    for contestant in contestants:
        contestant.end()
    return rounds[warm_up:]


def _rotated(items: Sequence[Contestant], places: int) -> list[Contestant]:
    """Return `items` rotated by `places`, which cancels the effect of the predecessor over the rounds."""
    start = places % len(items)
    return [*items[start:], *items[:start]]


def report(of_setting: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Iterate over the lines of a table of medians. Ratios are per round, with the quartiles over all rounds."""
    titles = {
        "ratio": f"of {BASELINE}",
        "cpu_ratio": "the same, by processor time",
        "default_ratio": f"of {BY_DEFAULT}, by processor time",
    }
    kinds = [kind for kind in titles if kind in of_setting[BASELINE]]
    yield "| training | samples/s | " + " | ".join(titles[kind] for kind in kinds) + " |"
    yield "|---|---|" + "---|" * len(kinds)
    for name, found in of_setting.items():
        ratios = " | ".join(with_spread(found[kind]) for kind in kinds)
        yield f"| {name} | {found['samples_per_second']:.1f} | {ratios} |"


def figures(rounds: Sequence[Round]) -> dict[str, dict[str, Any]]:
    """Return samples per second and the quartiles of ratios, by training.

    Ratios are those to the hand-written loop, and `default_ratio` that to transformers' Trainer with its defaults.
    """
    found = {}
    for name in rounds[0].costs:
        found[name] = {
            "samples_per_second": statistics.median(r.samples / r.costs[name].seconds for r in rounds),
            "ratio": _quartiles([r.costs[BASELINE].seconds / r.costs[name].seconds for r in rounds]),
            "cpu_ratio": _quartiles([r.costs[BASELINE].cpu_seconds / r.costs[name].cpu_seconds for r in rounds]),
        }
        if BY_DEFAULT in rounds[0].costs:
            ratios = [r.costs[BY_DEFAULT].cpu_seconds / r.costs[name].cpu_seconds for r in rounds]
            found[name]["default_ratio"] = _quartiles(ratios)
    return found


def _quartiles(values: Sequence[float]) -> list[float]:
    return [round(value, 4) for value in (statistics.quantiles(values, n=4) if len(values) > 1 else [*values] * 3)]


def regressions(found: Figures, stored: Figures) -> Iterator[str]:
    """Yield a line for each ratio by processor time that is more than 5 % below the stored one, or has none."""
    for setting in found.keys() - stored.keys():
        yield f"no stored ratio: {setting}"
    for setting, of_training in found.items():
        for name, numbers in of_training.items():
            now, before = numbers["cpu_ratio"][1], stored.get(setting, {}).get(name, {}).get("cpu_ratio")
            if before is not None and now < before[1] * _LEAST_SHARE:
                yield f"slower than stored: {setting}, {name}: ratio {now:.3f}, stored {before[1]:.3f}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="numbers of ranks to compare on")
    parser.add_argument("--models", choices=MODELS, nargs="+", default=["small", "medium"], help="sizes of BERT")
    parser.add_argument("--precisions", choices=("fp32", "bf16"), nargs="+", default=["fp32"])
    parser.add_argument("--tasks", choices=TASKS, nargs="+", default=["classification"], help="tasks of the samples")
    parser.add_argument("--further", choices=FURTHER, nargs="+", default=[], help="further trainings of ours")
    parser.add_argument("--keys", nargs="+", default=[], help="overrides for all trainings, such as data.pad_to=32")
    parser.add_argument("--defaults", action="store_true", help="add transformers' Trainer with its own batches")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    parser.add_argument("--store", action="store_true", help=f"add the figures to docs/{STORED.name}")
    parser.add_argument("--rounds", type=int, default=50, help="rounds that count")
    parser.add_argument("--warm-up", type=int, default=1, help="rounds before them; a compiled training needs more")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps of each training in a round")
    options = parser.parse_args(arguments)
    if options.defaults and options.tasks != ["classification"]:
        parser.error("--defaults needs --tasks classification")
    os.environ["OMP_NUM_THREADS"] = "1"  # before a rank imports torch, because ranks share the cores
    # With one extra step, no training ends before its last block.
    total_steps = (options.warm_up + options.rounds) * options.steps + 1
    found: dict[str, dict[str, dict[str, Any]]] = {}
    kinds = OURS | {f"ours, {name}": FURTHER[name] for name in options.further}
    settings = product(options.processes, options.models, options.tasks, options.precisions)
    for processes, model, task, precision in settings:
        with tempfile.TemporaryDirectory() as folder:
            recipes = {
                name: benchmark_recipe(model, total_steps, Path(folder), precision, task, [*options.keys, *keys])
                for name, keys in (kinds | (SHARDED if processes > 1 else {})).items()
            }
            pool = RankPool(processes)
            try:
                rounds = pool.run(
                    compete,
                    recipes,
                    options.rounds,
                    options.steps,
                    options.warm_up,
                    options.defaults,
                    timeout_seconds=3600,
                )[0]
            finally:
                pool.close()
        named = [] if task == "classification" else [task]
        ranks = "1 process" if processes == 1 else f"{processes} processes"
        beside = [f"beside {BY_DEFAULT}"] if options.defaults else []
        setting = ", ".join([f"{model} BERT", *named, precision, ranks, *options.keys, *beside])
        found[setting] = figures(rounds)
        print(f"\n{setting}\n", *report(found[setting]), sep="\n", flush=True)
        if options.json:  # after each setting, so that an interrupted run keeps the others
            options.json.write_text(json.dumps(found, indent=2) + "\n")
    stored = json.loads(STORED.read_text()) if STORED.exists() else {}
    for line in regressions(found, stored):
        print(line)
    if options.store:
        STORED.write_text(json.dumps(stored | found, indent=2) + "\n")


if __name__ == "__main__":
    main()
