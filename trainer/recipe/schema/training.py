"""The section `training`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from trainer.recipe.schema.fields import IntervalField
from trainer.recipe.schema.section import Contradiction, Section, clash


class Training(Section):
    """Length of the training, batch size, clipping and seed."""

    epochs: Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0)] = 3
    """Passes over the training split, also 0.5 or 2.5; part of a step counts as one."""
    max_steps: Annotated[int, Field(ge=1)] | None = None
    """Total optimizer steps, at which the schedule ends; null: those of all epochs."""
    stop_at_step: Annotated[int, Field(ge=1)] | None = None
    """Save and exit with code 75 after this step; the schedule stays the same."""
    global_batch_size: int = Field(32, ge=1)
    """Examples in one optimizer step over all ranks, under every layout."""
    micro_batch_size: Annotated[int, Field(ge=1)] | None = 8
    """Maximum examples in one forward pass of a rank; accumulation follows. null: see `micro_batch_tokens`."""
    micro_batch_tokens: Annotated[int, Field(ge=1)] | None = None
    """Maximum tokens in one forward pass of a rank, instead of `micro_batch_size`; padding counts, except with
    `data.padding_free`."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Maximum global gradient norm; null: no clipping."""
    check_replicas: IntervalField | None = None
    """How often to check that replicas of weights are bitwise equal; null: never."""
    max_bad_steps: Annotated[int, Field(ge=0)] = 0
    """Maximum steps to skip for a non-finite loss or gradient."""
    seed: int = Field(42, ge=0, lt=2**63)
    """Seed of initialisation, sample order, dropout and masked tokens."""
    layout_invariant_dropout: bool = True
    """Dropout masks that are the same under every layout; false: torch's own dropout."""

    def contradictions(self) -> Iterator[Contradiction]:
        stop, last = self.stop_at_step, self.max_steps
        if stop is not None and last is not None and stop > last:
            text = f"must be at most `training.max_steps` {last}, but is {stop}"
            yield clash(text, "training.stop_at_step", "training.max_steps")
        rows, tokens = "training.micro_batch_size", "training.micro_batch_tokens"
        if self.micro_batch_tokens is None and self.micro_batch_size is None:
            yield clash(f"is null, and `{tokens}` too; set one of them", rows, tokens)
