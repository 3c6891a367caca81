"""The section `task` of language modelling, and the generation of texts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from trainer.recipe.schema.fields import Name
from trainer.recipe.schema.section import Contradiction, Section, clash, shared
from trainer.recipe.schema.task_keys import DECODER, TextKeys, Traits, VocabularyKeys


class MaskedLM(TextKeys, VocabularyKeys):
    """Predict masked tokens of each text, or pair of texts, as in the pretraining of BERT.

    `text` may name a column of lists of token ids, with padding by a column `attention_mask`.
    Of the selected tokens, 80 % become the mask token, 10 % a random token, and 10 % stay. Each epoch selects other
    tokens; the validation split has the same selection at every evaluation.
    """

    type: Literal["masked_lm"]
    traits = Traits(streams=True, teacher=True)
    also_called = ("fill_mask", "mlm")
    mask_probability: float = Field(0.15, gt=0, lt=1)
    """Probability of a token to be selected, except special ones."""
    metrics: list[Literal["accuracy", "perplexity"]] = Field(default=["accuracy"], min_length=1)
    """Share of selected tokens predicted correctly; exponential of their mean loss."""


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


class CausalLM(VocabularyKeys):
    """Predict each next token: of texts, of the completions of prompts, or of the assistant's turns in chats."""

    type: Literal["causal_lm"]
    traits = Traits(streams=True, teacher=True, chats=True, noise=True)
    start = DECODER
    also_called = ("text_generation", "clm", "language_modeling", "sft", "chat", "conversational")
    text: Name | None = None
    """Column of texts, or of lists of token ids; all tokens are trained. Beside token ids, `attention_mask` 0 marks
    padding, and `labels` -100 a token that is not trained."""
    prompt: Name | None = None
    """Column of prompts, texts or messages, not trained."""
    completion: Name | None = None
    """Column of completions of the prompts."""
    generation: Generation = Generation()
    """Length of the texts of `trainer predict`, and their search."""
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
        yield from self.generation.contradictions()
        columns = self.sources
        given = list(columns)
        keys = [f"task.{key}" for key in given]
        named = " and ".join(f"`{key}`" for key in keys)
        if not given:
            yield clash("is missing; set it, or `task.messages`, or `task.prompt` and `task.completion`", "task.text")
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
