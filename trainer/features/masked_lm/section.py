"""The section `task` of masked language modelling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from trainer.recipe.schema.section import Contradiction, clash
from trainer.recipe.schema.task_keys import TextKeys, Traits, VocabularyKeys


class MaskedLM(TextKeys, VocabularyKeys):
    """Predict masked tokens of each text, or pair of texts, as in the pretraining of BERT.

    `text` may name a column of lists of token ids, with padding by a column `attention_mask`.
    Each epoch selects other tokens; the validation split has the same selection at every evaluation.
    """

    implementation = "trainer.features.masked_lm.masked_lm:MaskedLMTask"
    type: Literal["masked_lm"]
    traits = Traits(streams=True, teacher=True)
    pipelines = ("fill_mask",)
    also_called = ("mlm",)
    mask_probability: float = Field(0.15, gt=0, lt=1)
    """Probability of a token to be selected, except special ones."""
    mask_probability_end: Annotated[float, Field(gt=0, lt=1)] | None = None
    """This probability in the last step, and in evaluations; null: it stays the same."""
    mask_decay: Literal["linear", "cosine"] = "linear"
    """Curve of the probability between the first step and the last."""
    mask_units: Literal["tokens", "words", "spans"] = "tokens"
    """Select each token by itself, whole words, or spans of 1 to 10 words (SpanBERT)."""
    mask_shares: list[Annotated[float, Field(ge=0, le=1)]] = Field(default=[0.8, 0.1, 0.1], min_length=3, max_length=3)
    """Shares of the selected tokens that become the mask token, become a random token, and stay."""
    metrics: list[Literal["accuracy", "perplexity"]] = Field(default=["accuracy"], min_length=1)
    """Share of selected tokens predicted correctly; exponential of their mean loss."""

    def contradictions(self) -> Iterator[Contradiction]:
        yield from super().contradictions()
        if abs((total := sum(self.mask_shares)) - 1) > 1e-6:
            yield clash(f"must sum to 1, but sums to {total:g}; use [0.8, 0.1, 0.1] as BERT", "task.mask_shares")
        if self.mask_decay != "linear" and self.mask_probability_end is None:
            yield clash("needs a rate to decay to; set `task.mask_probability_end`", "task.mask_decay")
