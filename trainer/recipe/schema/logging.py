"""The section `logging`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from trainer.base.logging_targets import logging_targets
from trainer.recipe.schema.fields import Interval, IntervalField, text_pattern
from trainer.recipe.schema.section import Contradiction, Section, clash

Project = Annotated[
    str,
    text_pattern(
        r"^[A-Za-z0-9][A-Za-z0-9 ._-]{0,127}$",
        "1 to 128 letters, digits, spaces, `.`, `_` and `-`, a letter or digit first",
    ),
]


class Logging(Section):
    """Output during training."""

    every: IntervalField = Interval(10, "steps")
    """How often training metrics are shown and written."""
    to: list[Literal["console", "jsonl"]] = Field(default=["console", "jsonl"])
    """`metrics.jsonl` is always written. `html` keeps `report.html` up to date."""
    project: Project | None = Field(default=None)
    """Project of a tracking service, experiment of MLflow; null: the service's setting."""

    def contradictions(self) -> Iterator[Contradiction]:
        able = [word for word, target in logging_targets().items() if target.has_project]
        if self.project is not None and not {*able} & {*self.to}:
            names = ", ".join(f'"{word}"' for word in able) or "tracking services"
            text = f"applies only to {names}, but `logging.to` has none of them; add one, or set this key to null"
            yield clash(text, "logging.project", "logging.to")
