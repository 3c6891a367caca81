"""Construction of the observers of the recipe's `logging`; only packages of the named destinations are imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import TextIO

from trainer.base.extensions import registered, resolved
from trainer.observe.console import open_console
from trainer.observe.csv_files import CsvFiles
from trainer.observe.metrics_file import MetricsFile
from trainer.observe.mlflow import MLflowService
from trainer.observe.observer import Observer, Observers
from trainer.observe.tensorboard import TensorBoard
from trainer.observe.tracking import Tracker
from trainer.observe.trackio import TrackioService
from trainer.observe.wandb import WandbService
from trainer.recipe.schema import Logging


def build_observers(logging: Logging, stream: TextIO) -> Observers:
    """Return the observers of rank 0; other ranks have `Observers()`.

    `metrics.jsonl` is always written. The console is last, so it draws nothing if a file cannot be opened.

    Args:
        logging: the section of the recipe.
        stream: the output of the console, the standard output of rank 0.

    Raises:
        UsageError: a destination needs a package that is not installed.
    """
    console = open_console(stream) if "console" in logging.to else Observer()
    builders: dict[str, Callable[[], Observer]] = {
        "csv": CsvFiles,
        "tensorboard": TensorBoard,
        "wandb": lambda: Tracker(WandbService(logging.project), console.note),
        "mlflow": lambda: Tracker(MLflowService(logging.project), console.note),
        "trackio": lambda: Tracker(TrackioService(logging.project), console.note),
    }
    built = [build() for word, build in builders.items() if word in logging.to]
    built += [resolved(row.value)() for row in registered("logging") if row.name in logging.to]
    return Observers([MetricsFile(), *built, console])
