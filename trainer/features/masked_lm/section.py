"""The section `task` of masked language modelling."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trainer.recipe.schema.task_keys import TextKeys, Traits, VocabularyKeys


class MaskedLM(TextKeys, VocabularyKeys):
    """Predict masked tokens of each text, or pair of texts, as in the pretraining of BERT.

    `text` may name a column of lists of token ids, with padding by a column `attention_mask`.
    Of the selected tokens, 80 % become the mask token, 10 % a random token, and 10 % stay. Each epoch selects other
    tokens; the validation split has the same selection at every evaluation.
    """

    implementation = "trainer.features.masked_lm.masked_lm:MaskedLMTask"
    type: Literal["masked_lm"]
    traits = Traits(streams=True, teacher=True)
    pipelines = ("fill_mask",)
    also_called = ("mlm",)
    mask_probability: float = Field(0.15, gt=0, lt=1)
    """Probability of a token to be selected, except special ones."""
    metrics: list[Literal["accuracy", "perplexity"]] = Field(default=["accuracy"], min_length=1)
    """Share of selected tokens predicted correctly; exponential of their mean loss."""
