"""The key of the section `task` of tasks with a loss over the vocabulary."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from trainer.recipe.schema.task_keys import VocabularyKeys


class ChunkKeys(VocabularyKeys):
    """The size of a block of the vocabulary."""

    vocabulary_chunk: Annotated[int, Field(ge=1)] | Literal["auto"] | None = "auto"
    """Tokens of the vocabulary with logits in memory at a time, with equal results. `auto`: at least 4,096, for logits
    of more than 64 MiB, or 1 GiB if the head is trained. null: all."""
