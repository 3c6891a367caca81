"""The section `task` of language modelling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from trainer.recipe.schema.fields import Name
from trainer.recipe.schema.section import Contradiction, clash, shared
from trainer.recipe.schema.task_keys import DECODER, GenerativeKeys, Traits


class CausalLM(GenerativeKeys):
    """Predict each next token: of texts, of the completions of prompts, or of the assistant's turns in chats."""

    type: Literal["causal_lm"]
    traits = Traits(streams=True, teacher=True, chats=True, noise=True)
    start = DECODER
    pipelines = ("text_generation",)
    also_called = ("clm", "language_modeling", "sft", "chat", "conversational")
    text: Name | None = None
    """Column of texts, or of lists of token ids; all tokens are trained. Beside token ids, `attention_mask` 0 marks
    padding, and `labels` -100 a token that is not trained."""
    prompt: Name | None = None
    """Column of prompts, texts or messages, not trained."""
    completion: Name | None = None
    """Column of completions of the prompts."""
    packing: Literal["none", "documents", "joined"] = "none"
    """Fill rows of `data.max_length` tokens with several documents. `documents` keeps attention and positions inside
    each; `joined` lets them see each other (texts only)."""
    metrics: list[Literal["perplexity", "accuracy"]] = Field(default=["perplexity"], min_length=1)
    """Exponential of the mean loss of trained tokens; share predicted correctly."""

    @property
    def sources(self) -> dict[str, str]:
        """The columns of texts and chats by their keys."""
        keys = ("text", "prompt", "completion", "messages")
        return {key: column for key in keys if (column := getattr(self, key, None)) is not None}

    def contradictions(self) -> Iterator[Contradiction]:
        yield from super().contradictions()
        columns = self.sources
        given = list(columns)
        keys = [f"task.{key}" for key in given]
        named = " and ".join(f"`{key}`" for key in keys)
        if not given:
            chats = "`task.messages`, or " if "messages" in type(self).model_fields else ""
            yield clash(f"is missing; set it, or {chats}`task.prompt` and `task.completion`", "task.text")
        elif given in (["prompt"], ["completion"]):
            (missing,) = {"prompt", "completion"} - columns.keys()
            yield clash(f"is missing; {named} needs it", f"task.{missing}", *keys)
        elif given not in (["text"], ["messages"], ["prompt", "completion"]):
            yield clash(f"must be the only source of examples, but set are {named}; set the others to null", *keys)
        else:
            yield from shared(columns)
        if self.packing == "joined" and given != ["text"]:
            yield clash(
                f'is "joined", which applies to `task.text`, but the examples are {named}; use "documents"',
                "task.packing",
                *keys,
            )
