"""Construction of the observers of the recipe's `logging`; only packages of the named destinations are imported."""

from __future__ import annotations

from typing import Any, TextIO

from trainer.base.extensions import registered, resolved
from trainer.observe.console import open_console
from trainer.observe.metrics_file import MetricsFile
from trainer.observe.observer import Observer, Observers
from trainer.recipe.schema import Logging

# Texts, so that a run imports its own destinations only.
_FILES = {"csv": "csv_files:CsvFiles", "tensorboard": "tensorboard:TensorBoard"}
_SERVICES = {"wandb": "wandb:WandbService", "mlflow": "mlflow:MLflowService", "trackio": "trackio:TrackioService"}


def build_observers(logging: Logging, stream: TextIO) -> Observers:
    """Return the observers of rank 0; other ranks have `Observers()`.

    `metrics.jsonl` is always written. The console is last, so it draws nothing if a file cannot be opened.

    Args:
        stream: the output of the console, the standard output of rank 0.

    Raises:
        UsageError: a destination needs a package that is not installed.
    """
    console = open_console(stream) if "console" in logging.to else Observer()
    built: list[Observer] = [_resolved(name)() for word, name in _FILES.items() if word in logging.to]
    services = [_resolved(name) for word, name in _SERVICES.items() if word in logging.to]
    if services:
        from trainer.observe.tracking import Tracker

        built += [Tracker(service(logging.project), console.note) for service in services]
    built += [resolved(row.value)() for row in registered("logging") if row.name in logging.to]
    return Observers([MetricsFile(), *built, console])


def _resolved(name: str) -> Any:
    return resolved(f"trainer.observe.{name}")
