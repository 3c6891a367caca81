"""The section `evaluation`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trainer.recipe.schema.fields import Interval, IntervalField, Name
from trainer.recipe.schema.section import Section


class Evaluation(Section):
    """When to evaluate the validation split, and which metric selects the best model."""

    every: IntervalField | None = Interval(1, "epochs")
    """How often to evaluate; null: never, the default without a validation split."""
    best: Name | None = None
    """Metric that selects the best model, or "loss"; null: the first of `task.metrics`. The loss decides between equal
    values."""
    patience: Annotated[int, Field(ge=1)] | None = None
    """Stop after this many evaluations without a better value of `best`; null: never."""
    batch_size: int = Field(32, ge=1)
    """Examples in one forward pass of a rank; metrics do not depend on it."""
    verify_export: int = Field(4, ge=0)
    """Rows on which the end of a run compares the exported model with the trained one."""
