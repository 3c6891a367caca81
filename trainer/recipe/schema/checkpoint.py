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


class MemoryCheckpoint(Section):
    """Checkpoints in the memory of the hosts, from which a run resumes after the failure of a process or a host."""

    every: IntervalField
    """How often to save one; more often than `checkpoint.every`."""
    folder: RunPathField = "/dev/shm"
    """Folder of each host, on a memory file system."""


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
    memory: MemoryCheckpoint | None = None
    """Further checkpoints in the memory of the hosts, each also on the next host; null: none. A restart resumes from
    the newest complete checkpoint, in memory or on the disk."""

    def contradictions(self) -> Iterator[Contradiction]:
        for placeholder in re.findall(r"\{.*?\}", self.folder):
            if placeholder != "{name}":
                yield clash(f"has {shown_value(placeholder)}; the only placeholder is {{name}}", "checkpoint.folder")
        yield from _leaving("checkpoint.folder", self.folder)
        if self.memory is not None:
            yield from _leaving("checkpoint.memory.folder", self.memory.folder)
        every, in_memory = self.every, self.memory.every if self.memory else None
        if every and in_memory and in_memory.unit == every.unit and in_memory.count >= every.count:
            text = f'must be more often than `checkpoint.every`, which is "{every}", but is "{in_memory}"; lower it'
            yield clash(text, "checkpoint.memory.every", "checkpoint.every")


def _leaving(key: str, folder: str) -> Iterator[Contradiction]:
    """Refuse a relative folder that is not below the current one, where a run would write and delete files."""
    if os.path.normpath(folder).split(os.sep)[0] == os.pardir:
        text = f"must be below the current folder, but is {shown_value(folder)}; write it as an absolute path"
        yield clash(text, key)
