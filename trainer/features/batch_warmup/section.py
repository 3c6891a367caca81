"""The key `batch_size_warmup` of the section `training` of a recipe."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trainer.recipe.schema import Section


class BatchSizeWarmup(Section):
    """Smaller global batches at the start of a training. Set `steps` or `samples`."""

    start: int = Field(ge=1)
    """Examples in the first steps over all ranks; below `training.global_batch_size`."""
    increment: Annotated[int, Field(ge=1)] | None = None
    """Difference between two sizes; the last one may be smaller. null: `start`."""
    steps: Annotated[int, Field(ge=1)] | None = None
    """Steps of the warm-up, the same number for each size (ModernBERT)."""
    samples: Annotated[int, Field(ge=1)] | None = None
    """Examples of the warm-up, the same number for each size, in whole steps (Megatron)."""


class WarmupKeys(Section):
    """The growth of the global batch."""

    batch_size_warmup: BatchSizeWarmup | None = None
    """Smaller global batches at the start, a function of the step only; null: none."""
