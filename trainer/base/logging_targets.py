"""The words of `logging.to` beside `console` and `jsonl`, as registered rows that name their code as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trainer.base.extensions import rows_of


@dataclass(frozen=True)
class LoggingTarget:
    """A target of the metrics of a run, such as a tracking service.

    Attributes:
        observer: The text "module:name" of an `Observer` or of a function that returns one. It is called with
            nothing; with `has_project`, with `logging.project` and a function that shows a note on the console.
        has_project: Whether `logging.project` applies to it.
        writes: Entries of the run's folder that it opens in place, so that a link there could lead elsewhere.
        no_telemetry: Environment variables that stop its package from reporting its use.
    """

    observer: str
    has_project: bool = False
    writes: Sequence[str] = ()
    no_telemetry: Mapping[str, str] = field(default_factory=dict)


def logging_targets() -> dict[str, LoggingTarget]:
    """Return the registered targets by their words; a row of `extension.json` holds their attributes."""
    return rows_of("logging", LoggingTarget)
