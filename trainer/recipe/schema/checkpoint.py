"""The section `checkpoint`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from trainer.recipe.paths import shown_value
from trainer.recipe.schema.fields import IntervalField, RunPathField
from trainer.recipe.schema.section import Contradiction, Section, clash

_NAME = "{name}"


class Checkpoint(Section):
    """Folder of the run, frequency of checkpoints, and resumption."""

    folder: RunPathField = "runs/{name}"
    """Absolute, or below the current folder; `{name}` is the recipe's name."""
    every: IntervalField | None = None
    """How often to save a checkpoint; null: only at a stop and at the end."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints to keep, beside that of the best evaluation."""
    asynchronous: bool = True
    """Write from a copy in CPU memory while training continues; false: wait."""
    resume: Literal["auto", "never"] = "auto"
    """auto: from the newest checkpoint in the folder; never: a checkpoint there is an error."""

    def contradictions(self) -> Iterator[Contradiction]:
        yield from unknown_placeholders("checkpoint.folder", self.folder)
        yield from leaving("checkpoint.folder", self.folder)


def with_name(place: str, name: str) -> str:
    """Return a place with the name of the recipe in it."""
    return place.replace(_NAME, name)


def unknown_placeholders(key: str, place: str) -> Iterator[Contradiction]:
    """Refuse placeholders that `with_name` does not replace."""
    for placeholder in re.findall(r"\{.*?\}", place):
        if placeholder != _NAME:
            yield clash(f"has {shown_value(placeholder)}; the only placeholder is {_NAME}", key)


def leaving(key: str, folder: str) -> Iterator[Contradiction]:
    """Refuse a relative folder that is not below the current one, where a run would write and delete files."""
    if os.path.normpath(folder).split(os.sep)[0] == os.pardir:
        text = f"must be below the current folder, but is {shown_value(folder)}; write it as an absolute path"
        yield clash(text, key)
