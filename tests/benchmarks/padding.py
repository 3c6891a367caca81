"""Samples per second with padding, with rows of similar length, and without padding, in the same process.

An epoch of each training in turn; every epoch has all rows of the sample. From the root of the repository:

    python -m tests.benchmarks.padding --models small medium --epochs 3
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.benchmarks.setting import MODELS, Setting, benchmark_recipe
from trainer.engine.building import build_engine
from trainer.engine.engine import Engine
from trainer.parallel.microbatch import RankBatch
from trainer.recipe.schema import Recipe

KINDS = {
    "padded": (False, False),
    "packed": (False, True),
    "grouped by length": (True, False),
    "grouped by length, packed": (True, True),
}
"""`data.group_by_length` and `data.packing` of each training."""


def _train(engine: Engine, batches: Iterator[RankBatch], num_steps: int) -> float:
    """Train some steps, and return their samples per second of processor time."""
    start, samples = time.process_time(), 0
    for _ in range(num_steps):
        batch = next(batches)
        engine.train_step(batch)
        samples += batch.num_rows
    return samples / (time.process_time() - start)


def compete(recipe: Recipe, num_epochs: int) -> dict[str, list[float]]:
    """Return the samples per second of each epoch of each training, after two steps that warm up."""
    trainings = {}
    for name, (grouped, packed) in KINDS.items():
        data = recipe.data.model_copy(update={"group_by_length": grouped, "packing": packed})
        setting = Setting.of(recipe.model_copy(update={"data": data}), 1)
        engine = build_engine([setting.model()], setting.task, setting.mesh, setting.plan, setting.total_steps)
        trainings[name] = engine, setting.batches(), setting.batches_per_epoch
        _train(*trainings[name][:2], 2)
    rates: dict[str, list[float]] = {name: [] for name in KINDS}
    for _ in range(num_epochs):
        for name, training in trainings.items():
            rates[name].append(_train(*training))
    return rates


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", choices=MODELS, nargs="+", default=list(MODELS), help="sizes of BERT")
    parser.add_argument("--epochs", type=int, default=3, help="epochs of each training")
    options = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"
    for model in options.models:
        with tempfile.TemporaryDirectory() as folder:
            rates = compete(benchmark_recipe(model, 10_000, Path(folder)), options.epochs)
        print(f"\n{model} BERT\n\n| training | samples/s | of padded |\n|---|---|---|")
        for name, of_epochs in rates.items():
            ratios = [rate / base for rate, base in zip(of_epochs, rates["padded"], strict=True)]
            spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            print(f"| {name} | {statistics.median(of_epochs):.1f} | {spread} |", flush=True)


if __name__ == "__main__":
    main()
