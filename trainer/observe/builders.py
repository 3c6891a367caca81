"""Construction of the observers of the recipe's `logging`; only packages of the named destinations are imported."""

from __future__ import annotations

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
        stream: the output of the console, the standard output of rank 0.

    Raises:
        UsageError: a destination needs a package that is not installed.
    """
    console = open_console(stream) if "console" in logging.to else Observer()
    files = {"csv": CsvFiles, "tensorboard": TensorBoard}
    built: list[Observer] = [kind() for word, kind in files.items() if word in logging.to]
    services = [kind for kind in (WandbService, MLflowService, TrackioService) if kind.word in logging.to]
    built += [Tracker(kind(logging.project), console.note) for kind in services]
    built += [resolved(row.value)() for row in registered("logging") if row.name in logging.to]
    return Observers([MetricsFile(), *built, console])
