"""Samples per second of our loop, a hand-written PyTorch loop and transformers' Trainer, on the same batches.

All trainings alternate in the same processes in blocks of steps: other load on the machine affects them equally. The
ratios are medians over the rounds. From the root of the repository:

    python -m tests.benchmarks.throughput --processes 1 2 --rounds 50

`make bench` measures more models and precisions, and writes `bench.json`. It prints each ratio that is more than 5 %
below the stored one in `tests/benchmarks/ratios.json`, and never fails because of one. `--store` stores them.
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
from itertools import product
from pathlib import Path

import torch.distributed as dist

from tests.benchmarks.contestants import hand_written, hugging_face, ours
from tests.benchmarks.setting import MODELS, Setting, benchmark_recipe
from tests.benchmarks.turns import Contestant, Cost
from tests.helpers.ranks import RankPool
from trainer.recipe.schema import Recipe

BASELINE = "PyTorch by hand"
Figures = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Numbers by setting (model, precision and processes), training and name."""

STORED = Path(__file__).with_name("ratios.json")
_LEAST_SHARE = 0.95
NAMES = (BASELINE, "ours", "ours, torch's dropout", "transformers' Trainer")


@dataclass(frozen=True)
class Round:
    """One block of steps of each training: the samples of all ranks, and the cost on this rank by training."""

    samples: int
    costs: dict[str, Cost]


def compete(recipe: Recipe, num_rounds: int, num_steps: int) -> list[Round]:
    """Run the rounds on this rank. All ranks must call it.

    One more round, the warm-up, comes first and is not returned.
    """
    world_size = dist.get_world_size()
    _name_ranks_in_environment(dist.get_rank(), world_size)
    keyed = Setting.of(recipe, world_size)
    torchs = keyed.with_dropout(layout_invariant=False)
    ready = list(keyed.batches())
    # Our loop prepares batches while it trains; the others get prepared batches.
    contestants = [
        Contestant(name, partial(train, setting), batches)
        for name, train, setting, batches in zip(
            NAMES,
            (hand_written, ours, ours, hugging_face),
            (torchs, keyed, torchs, torchs),
            (ready, keyed.batches(), torchs.batches(), ready),
            strict=True,
        )
    ]
    rounds = []
    for number in range(num_rounds + 1):
        costs = {}
        for contestant in _rotated(contestants, number):
            dist.barrier()
            costs[contestant.name] = contestant.block(num_steps)
        block = ready[number * num_steps : (number + 1) * num_steps]
        rounds.append(Round(sum(batch.num_rows for batch in block), costs))
    for contestant in contestants:
        contestant.end()
    return rounds[1:]


def _name_ranks_in_environment(rank: int, world_size: int) -> None:
    """Set the variables by which accelerate, which transformers' Trainer uses, finds the existing process group."""
    if world_size > 1:
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        os.environ |= {name: str(value) for name, value in variables.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def _rotated(items: Sequence[Contestant], places: int) -> list[Contestant]:
    """Return `items` rotated by `places`, which cancels the effect of the predecessor over the rounds."""
    start = places % len(items)
    return [*items[start:], *items[:start]]


def report(rounds: Sequence[Round]) -> Iterator[str]:
    """Iterate over the lines of a table of medians. Ratios are per round, with the quartiles over all rounds."""
    yield f"| training | samples/s | of {BASELINE} | the same, by processor time |"
    yield "|---|---|---|---|"
    for name in NAMES:
        rate = statistics.median(r.samples / r.costs[name].seconds for r in rounds)
        elapsed = [r.costs[BASELINE].seconds / r.costs[name].seconds for r in rounds]
        processor = [r.costs[BASELINE].cpu_seconds / r.costs[name].cpu_seconds for r in rounds]
        yield f"| {name} | {rate:.1f} | {_with_spread(elapsed)} | {_with_spread(processor)} |"


def figures(rounds: Sequence[Round]) -> dict[str, dict[str, float]]:
    """Return samples per second and the median ratios to the hand-written loop, by training."""
    return {
        name: {
            "samples_per_second": statistics.median(r.samples / r.costs[name].seconds for r in rounds),
            "ratio": statistics.median(r.costs[BASELINE].seconds / r.costs[name].seconds for r in rounds),
            "cpu_ratio": statistics.median(r.costs[BASELINE].cpu_seconds / r.costs[name].cpu_seconds for r in rounds),
        }
        for name in NAMES
    }


def regressions(found: Figures, stored: Figures) -> Iterator[str]:
    """Yield a line for each ratio by processor time that is more than 5 % below the stored one."""
    for setting, of_training in found.items():
        for name, numbers in of_training.items():
            before = stored.get(setting, {}).get(name, {}).get("cpu_ratio")
            if before is not None and numbers["cpu_ratio"] < before * _LEAST_SHARE:
                yield f"slower than stored: {setting}, {name}: ratio {numbers['cpu_ratio']:.3f}, stored {before:.3f}"


def _with_spread(values: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else [*values] * 3
    return f"{middle:.3f} ({low:.2f} to {high:.2f})"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="numbers of ranks to compare on")
    parser.add_argument("--models", choices=MODELS, nargs="+", default=["small", "medium"], help="sizes of BERT")
    parser.add_argument("--precisions", choices=("fp32", "bf16"), nargs="+", default=["fp32"])
    parser.add_argument("--json", type=Path, help="a file for the figures")
    parser.add_argument("--store", action="store_true", help=f"add the figures to {STORED.name}")
    parser.add_argument("--rounds", type=int, default=50, help="rounds that count; one more warms up")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps of each training in a round")
    options = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"  # before a rank imports torch, because ranks share the cores
    # With one extra step, no training ends before its last block.
    total_steps = (options.rounds + 1) * options.steps + 1
    found: dict[str, dict[str, dict[str, float]]] = {}
    for processes, model, precision in product(options.processes, options.models, options.precisions):
        with tempfile.TemporaryDirectory() as folder:
            recipe = benchmark_recipe(model, total_steps, Path(folder), precision)
            pool = RankPool(processes)
            try:
                rounds = pool.run(compete, recipe, options.rounds, options.steps, timeout_seconds=3600)[0]
            finally:
                pool.close()
        setting = f"{model} BERT, {precision}, {'1 process' if processes == 1 else f'{processes} processes'}"
        print(f"\n{setting}\n", *report(rounds), sep="\n", flush=True)
        found[setting] = figures(rounds)
        if options.json:  # after each setting, so that an interrupted run keeps the others
            options.json.write_text(json.dumps(found, indent=2) + "\n")
    stored = json.loads(STORED.read_text()) if STORED.exists() else {}
    print(*regressions(found, stored), sep="\n", end="")
    if options.store:
        STORED.write_text(json.dumps(stored | found, indent=2) + "\n")


if __name__ == "__main__":
    main()
