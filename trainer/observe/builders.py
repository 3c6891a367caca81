"""Construction of the observers of the recipe's `logging`; only packages of the named destinations are imported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

from trainer.base.extensions import registered, resolved
from trainer.base.logging_targets import logging_targets
from trainer.observe.console import open_console
from trainer.observe.heartbeat import Heartbeat
from trainer.observe.metrics_file import MetricsFile
from trainer.observe.observer import Observer, Observers
from trainer.ranks.environment import LaunchEnvironment, library_settings
from trainer.recipe.registered import value_at
from trainer.recipe.schema import Logging, Recipe


@dataclass(frozen=True)
class ObserverParts:
    """The parts of a rank for its registered observers."""

    recipe: Recipe
    environment: LaunchEnvironment
    heartbeat: Heartbeat
    note: Callable[[str], None]  # shows a note to the user
    report_end: Callable[[str], object]  # reports a failure of the run to its observers, given the reason


ObserverBuilder = Callable[[ObserverParts], Observer | None]
"""A function that returns an observer of a rank, or None; a key or an environment variable asks for it."""


def registered_observers(parts: ObserverParts) -> list[Observer]:
    """Return the observers of this rank that folders register, without those that nothing asks for."""
    built = []
    for row in registered("observer"):
        # Only the modules of those that a key or an environment variable asks for are imported.
        if value_at(parts.recipe, row.name) is not None or any(library_settings(row.name, defaults={})):
            build: ObserverBuilder = resolved(row.value)
            built.append(build(parts))
    return [observer for observer in built if observer is not None]


def build_observers(logging: Logging, stream: TextIO) -> Observers:
    """Return the observers of rank 0; other ranks have `Observers()`.

    `metrics.jsonl` is always written. The console is last, so it draws nothing if a file cannot be opened.

    Args:
        stream: the output of the console, the standard output of rank 0.

    Raises:
        UsageError: a destination needs a package that is not installed.
    """
    console = open_console(stream) if "console" in logging.to else Observer()
    built: list[Observer] = [MetricsFile()]
    for word, target in logging_targets().items():
        if word in logging.to:
            arguments = (logging.project, console.note) if target.has_project else ()
            built.append(resolved(target.observer)(*arguments))
    return Observers([*built, console])
