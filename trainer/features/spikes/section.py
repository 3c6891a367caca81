"""The keys of the section `training` for losses that jump."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from trainer.recipe.schema import Section
from trainer.recipe.schema.section import Contradiction, clash


class SpikeKeys(Section):
    """The rule by which a loss counts as a jump, and the answer to it."""

    on_spike: Literal["rewind", "note"] | None = None
    """Loss that jumps: go back to a checkpoint and leave out the rows since then, or note it; null: do not look."""
    spike_window: int = Field(100, ge=4)
    """Number of the last regular losses that a loss is compared with; the first ones are not judged."""
    spike_factor: float = Field(10.0, gt=0)
    """A loss jumps above median + factor x deviation of the window: its median absolute deviation, at least 1 % of the
    median."""
    max_rewinds: int = Field(3, ge=1)
    """Maximum number of returns to a checkpoint; the next jump ends the run with code 3."""

    def contradictions(self) -> Iterator[Contradiction]:
        for key in self.changed("spike_window", "spike_factor", "max_rewinds") if self.on_spike is None else ():
            yield clash("applies to jumps of the loss; set `training.on_spike`, or remove this", f"training.{key}")
