"""The key `task.generation` of models that generate texts, and its rules."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from trainer.recipe.paths import shown_value
from trainer.recipe.schema import GenerativeKeys, Parallel, Section, TaskSection
from trainer.recipe.schema.section import Contradiction, clash


class Generation(Section):
    """Generation of texts, for metrics on texts and for predictions; an exported model has the given settings too."""

    max_new_tokens: int = Field(64, ge=1)
    """Maximum tokens of a generated text, with its end token."""
    min_new_tokens: int = Field(0, ge=0)
    """Minimum tokens of a generated text, without its end token."""
    num_beams: int = Field(1, ge=1)
    """Beams of the beam search; 1: the most probable token at each place."""
    length_penalty: float = 1.0
    """Exponent of the length in the divisor of a beam's score; larger ones prefer longer texts."""
    early_stopping: bool = False
    """Stop a beam search at `num_beams` complete texts."""
    do_sample: bool = False
    """Draw each token by its probability, from `training.seed`, row and place."""
    temperature: float = Field(1.0, gt=0)
    """With `do_sample`: divisor of the logits."""
    top_k: int = Field(0, ge=0)
    """With `do_sample`: most probable tokens to draw among; 0: all."""
    top_p: float = Field(1.0, gt=0, le=1)
    """With `do_sample`: draw among the fewest tokens with this total probability."""
    no_repeat_ngram_size: int | None = Field(None, ge=0)
    """Length of token sequences that may not repeat in a text; 0: any may; null: as the model's own settings say."""

    def contradictions(self) -> Iterator[Contradiction]:
        beams, draws = "task.generation.num_beams", "task.generation.do_sample"
        for key in self.changed("length_penalty", "early_stopping") if self.num_beams == 1 else []:
            text = f"applies to a beam search, but `{beams}` is 1; remove it, or use 2 or more"
            yield clash(text, f"task.generation.{key}", beams)
        if self.do_sample and self.num_beams > 1:
            yield clash(f"draws tokens, but `{beams}` is {self.num_beams}; set one of them only", draws, beams)
        for key in self.changed("temperature", "top_k", "top_p") if not self.do_sample else []:
            text = f"applies to drawn tokens, but `{draws}` is false; remove it, or set that to true"
            yield clash(text, f"task.generation.{key}", draws)
        if self.min_new_tokens >= self.max_new_tokens:
            most = "task.generation.max_new_tokens"
            text = f"must be below `{most}` ({self.max_new_tokens}), but is {self.min_new_tokens}"
            yield clash(text, "task.generation.min_new_tokens", most)


class GenerationKeys(GenerativeKeys):
    """The settings of the texts."""

    generation: Generation = Generation()
    """Length of generated texts, and their search."""

    def contradictions(self) -> Iterator[Contradiction]:
        yield from self.generation.contradictions()


def contradictions(task: TaskSection, parallel: Parallel) -> Iterator[Contradiction]:
    if not isinstance(task, GenerativeKeys):
        return
    stages = "parallel.pipeline.stages"
    texts = [name for name in task.metrics if name not in ("accuracy", "perplexity")]
    if texts and parallel.pipeline.stages > 1:
        text = (
            f"has {shown_value(texts[0])}, a metric of generated texts, for which a rank needs the whole model, but"
            f" `{stages}` is {parallel.pipeline.stages}; use accuracy or perplexity, and evaluate the exported model"
            " without stages"
        )
        yield clash(text, "task.metrics", stages)
