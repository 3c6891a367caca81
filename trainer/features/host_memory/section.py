"""The keys `checkpoint.memory` of a recipe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from trainer.recipe.schema import Recipe, Section
from trainer.recipe.schema.checkpoint import Checkpoint, leaving
from trainer.recipe.schema.fields import IntervalField, RunPathField
from trainer.recipe.schema.section import Contradiction, clash


class MemoryCheckpoint(Section):
    """Checkpoints in the memory of the hosts, from which a run resumes after the failure of a process or a host."""

    every: IntervalField
    """How often to save one; more often than `checkpoint.every`."""
    folder: RunPathField = "/dev/shm"
    """Folder of each host, on a memory file system."""


class MemoryKeys(Section):
    """The frequency and the folder of checkpoints in memory."""

    memory: MemoryCheckpoint | None = None
    """Further checkpoints in the memory of the hosts, each also on the next host; null: none. A restart resumes from
    the newest complete checkpoint, in memory or on the disk."""

    def contradictions(self) -> Iterator[Contradiction]:
        if self.memory is None:
            return
        yield from leaving("checkpoint.memory.folder", self.memory.folder)
        every, in_memory = cast(Checkpoint, self).every, self.memory.every
        if every and in_memory.unit == every.unit and in_memory.count >= every.count:
            text = f'must be more often than `checkpoint.every`, which is "{every}", but is "{in_memory}"; lower it'
            yield clash(text, "checkpoint.memory.every", "checkpoint.every")


def keys_of(recipe: Recipe) -> MemoryCheckpoint:
    """Return the keys of a recipe with checkpoints in memory."""
    keys = cast(MemoryKeys, recipe.checkpoint).memory
    assert keys is not None
    return keys
