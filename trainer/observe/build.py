"""From the recipe's `logging.to` to observers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from trainer.observe.console import open_console
from trainer.observe.metrics_file import MetricsFile
from trainer.observe.observer import Observer, Observers
from trainer.observe.tensorboard import TensorBoard


def build_observers(destinations: Sequence[str], stream: TextIO) -> Observers:
    """The observers of rank 0; other ranks have `Observers()`.

    `metrics.jsonl` is always written. The console stands last, so that it draws nothing where a file cannot be opened.

    Args:
        destinations: the recipe's `logging.to`.
        stream: where the console writes, which is the standard output of rank 0.

    Raises:
        UsageError: a destination needs a package that is not installed.
    """
    observers: list[Observer] = [MetricsFile()]
    if "tensorboard" in destinations:
        observers.append(TensorBoard())
    if "console" in destinations:
        observers.append(open_console(stream))
    return Observers(observers)
