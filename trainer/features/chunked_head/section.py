"""The key of the section `task` of tasks with a loss over the vocabulary."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from trainer.recipe.schema.task_keys import VocabularyKeys


class ChunkKeys(VocabularyKeys):
    """The tokens of a chunk."""

    logits_chunk: Annotated[int, Field(ge=1)] | Literal["auto"] | None = "auto"
    """Tokens with logits in memory at a time, with equal results. `auto`: all, up to 2 GiB of logits; above, 1 GiB at a
    time. null: the model returns its logits."""
