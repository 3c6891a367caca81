"""The section `task` of sequence-to-sequence language modelling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from trainer.recipe.schema.fields import Name
from trainer.recipe.schema.section import Contradiction, shared
from trainer.recipe.schema.task_keys import GenerativeKeys, Start, Traits


class Seq2SeqLM(GenerativeKeys):
    """Generate a target text from a source text by an encoder-decoder, as in summarisation and translation.

    The loss is the mean over the tokens of all targets. Each target ends with the end token.
    """

    implementation = "trainer.features.seq2seq_lm.seq2seq_lm:Seq2SeqLMTask"
    type: Literal["seq2seq_lm"]
    traits = Traits(streams=True)
    start = Start("t5_sample", "google-t5/t5-small", 1e-4)
    pipelines = ("summarization", "translation", "text2text_generation")
    also_called = ("seq2seq",)
    source: Name = "source"
    """Column of the source text."""
    target: Name = "target"
    """Column of the target text; it may be empty."""
    prefix: str = ""
    """Text before each source, such as `"summarize: "` for T5."""
    source_language: Name | None = None
    """Language of the sources in a multilingual tokenizer's spelling, such as `en_XX` of mBART."""
    target_language: Name | None = None
    """Language of the targets; set both or none."""
    max_target_length: int = Field(128, ge=2)
    """Maximum tokens of a target; longer ones are truncated, with a note."""
    metrics: list[Literal["rouge1", "rouge2", "rougeL", "rougeLsum", "bleu", "chrf", "accuracy", "perplexity"]] = Field(
        default=["perplexity"], min_length=1
    )
    """ROUGE (0 to 1), BLEU and chrF (0 to 100) of generated texts; share of target tokens predicted correctly from the
    true ones before; exponential of the mean loss."""

    @property
    def languages(self) -> tuple[str | None, str | None]:
        return self.source_language, self.target_language

    def contradictions(self) -> Iterator[Contradiction]:
        yield from super().contradictions()
        yield from shared({"source": self.source, "target": self.target})
