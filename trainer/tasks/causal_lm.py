"""Causal language modelling: texts, completions of prompts, and the assistant's turns of chats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

from trainer.base.errors import DataError, UsageError
from trainer.parallel.tensor.cross_entropy import VocabularyCut
from trainer.recipe.schema import Generation
from trainer.tasks.text.chats import (
    Tokens,
    Turns,
    chat_prompt,
    end_token,
    features_of,
    given,
    holds_messages,
    tokens_of_chat,
    tokens_of_pair,
    turn_end,
    turn_notes,
    without_end,
)
from trainer.tasks.text.columns import SEVERAL_TYPES, STRING_TYPES, cell, require_columns, type_name
from trainer.tasks.text.generated import GENERATED, generated_texts
from trainer.tasks.text.packing import DocumentPacker, Packer, StreamPacker
from trainer.tasks.token_labels import TokenLabels
from trainer.tasks.types import Dataset, EvaluatedSplit, Tokenizer

Packing = Literal["none", "documents", "joined"]

DECODERS = ("gpt2", "llama", "mistral", "qwen2", "qwen3")
"""The model types of the table that predict the next token."""

_ENCODERS = (
    "albert", "bert", "deberta-v2", "distilbert", "electra", "modernbert", "roberta", "xlm-roberta",
)  # fmt: skip


@dataclass(frozen=True)
class TextColumn:
    """Training on all tokens of the texts of a column, which the recipe's `key` names."""

    column: str
    key: str = "text"

    @property
    def columns(self) -> dict[str, str]:
        """The names of the columns, by the recipe's keys."""
        return {self.key: self.column}


@dataclass(frozen=True)
class CompletionColumns:
    """Training on the completions of prompts."""

    prompt: str
    completion: str

    @property
    def columns(self) -> dict[str, str]:
        return {"prompt": self.prompt, "completion": self.completion}


@dataclass(frozen=True)
class ChatColumn:
    """Training on the assistant's turns of chats."""

    messages: str

    @property
    def columns(self) -> dict[str, str]:
        return {"messages": self.messages}


Examples = TextColumn | CompletionColumns | ChatColumn


@dataclass(frozen=True)
class CausalLMTask(TokenLabels):
    """Causal language modelling with cross entropy over the vocabulary.

    The label of a token is the next token of its document. `vocabulary` describes how the logits are sharded over
    tensor ranks; None if they are not sharded. With `continues`, texts are prompts of generated texts.
    `num_positions` is the maximum number of tokens that the model reads; None: unknown.
    """

    examples: Examples
    packing: Packing
    metric_names: tuple[str, ...]
    vocabulary: VocabularyCut | None = None
    vocabulary_chunk: int | Literal["auto"] | None = None
    takes_token_scores: bool = False
    train_on: Turns = "all"
    settings: Generation = field(default_factory=Generation)
    continues: bool = False
    num_positions: int | None = None

    auto_class_name = "AutoModelForCausalLM"

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.examples.columns.values())

    @property
    def beside_rows(self) -> tuple[str, ...]:
        return (
            "metric_names",
            "vocabulary",
            "vocabulary_chunk",
            "takes_token_scores",
            *(() if self.continues else ("settings", "num_positions")),
        )

    @property
    def packs_documents(self) -> bool:
        return self.packing == "documents"

    @property
    def generates(self) -> bool:
        return self.continues

    @property
    def generation(self) -> Generation | None:
        return self.settings if self.continues else None

    def end_tokens(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        ends = [end_token(tokenizer)]
        if isinstance(self.examples, ChatColumn):
            ends += turn_end(tokenizer)
        return tuple(dict.fromkeys(ends))

    def tokenizer_notes(self, tokenizer: Tokenizer) -> list[str]:
        is_chat = isinstance(self.examples, ChatColumn) and not self.continues and tokenizer.is_fast
        return turn_notes(tokenizer, self.train_on) if is_chat and tokenizer.chat_template else []

    def conversion_notes(self, features: Mapping[str, Any]) -> list[str]:
        if not isinstance(self.examples, ChatColumn) or "tools" not in features:
            return []
        return ["column `tools` is not read: the chat template gets no descriptions of tools"]

    def for_configuration(self, config: Any) -> CausalLMTask:
        """Return the task; refuse a model that sees later tokens."""
        kind = config.model_type
        if kind in _ENCODERS:
            raise UsageError(
                f"`task.type` causal_lm needs a model that predicts the next token, but {kind} sees all tokens of a"
                f" text; use one such as {', '.join(DECODERS)}, or `task.type` masked_lm"
            )
        if self.packs_documents and config.is_encoder_decoder:
            raise UsageError(
                f'`task.packing` is "documents", but decoders of the type {kind} take no positions, which mark the'
                ' documents; use "none", or "joined", which lets documents see each other'
            )
        positions = getattr(config, "max_position_embeddings", None)
        if self.continues and positions is not None and self.settings.max_new_tokens >= positions:
            raise UsageError(
                f"`task.generation.max_new_tokens` must be below the {positions} positions of the model, but is"
                f" {self.settings.max_new_tokens}"
            )
        return replace(self, num_positions=positions)

    def check_columns(self, features: Mapping[str, Any], where: str) -> None:
        for key, column in self.examples.columns.items():
            require_columns(features, [column], f"task.{key}", where)
            feature = features[column]
            if isinstance(self.examples, ChatColumn):
                if not holds_messages(feature) and type_name(feature) != SEVERAL_TYPES:
                    raise DataError(
                        f'`task.messages` must name a column of lists of {{"role": ..., "content": ...}}, but column'
                        f" `{column}` of {where} holds {type_name(feature)}"
                    )
            elif holds_messages(feature):
                raise DataError(
                    f"`task.{key}` must name a column of strings, but column `{column}` of {where} holds messages; join"
                    " those of the prompt and of its completion in one column, and name it in `task.messages`"
                )
            elif getattr(feature, "dtype", None) not in STRING_TYPES:
                raise DataError(
                    f"`task.{key}` must name a column of strings, but column `{column}` of {where} holds"
                    f" {type_name(feature)}"
                )

    def packer(self, max_length: int) -> Packer | None:
        if self.packing == "none":
            return None
        if self.packing == "joined":
            return StreamPacker(max_length)
        return DocumentPacker(max_length, splits=isinstance(self.examples, TextColumn))

    def encode(
        self, rows: Dataset, tokenizer: Tokenizer, max_length: int, where: str, first_row: int
    ) -> dict[str, list[Any]]:
        """Tokenise texts, prompts with completions, or chats; see `TextTask.encode`.

        With `packing`, the result is documents, which `packer` turns into rows. Without it, a text that is longer than
        `max_length` becomes several rows; a prompt with its completion, or a chat, is truncated.

        Raises:
            DataError: a cell is null, a chat or a completion has no token to train, or it is cut by `max_length`.
            UsageError: the tokenizer has no end token or no chat template.
        """
        for column in self.columns:
            values = rows[column]
            if None in values:
                row = first_row + list(values).index(None)
                raise DataError(f"{cell(column, row, where)} is null; fill it, or leave the row out")
        if self.continues:
            return self._encode_prompts(rows, tokenizer, max_length, where, first_row)
        if isinstance(self.examples, TextColumn):
            return self._encode_texts(list(rows[self.examples.column]), tokenizer, max_length)
        examples: list[tuple[str, Tokens]] = []
        columns = (given(rows[column], [rows.features[column]]) for column in self.columns)
        for row, (first, *others) in enumerate(zip(*columns, strict=True)):
            place = cell(self.columns[-1], first_row + row, where)
            if others:
                found = [tokens_of_pair(first, others[0], tokenizer, place)]
            else:
                found = tokens_of_chat(first, tokenizer, self.train_on, place)
            examples += [(place, tokens) for tokens in found]
        return features_of(examples, max_length)

    def _encode_prompts(
        self, rows: Dataset, tokenizer: Tokenizer, max_length: int, where: str, first_row: int
    ) -> dict[str, list[Any]]:
        """Return the tokens of prompts; those of a long prompt are its last ones, which the generated text follows.

        A chat is the prompt of its next turn of the assistant. If that is its last turn, it is left out.
        """
        (column,), end = self.columns, end_token(tokenizer)
        if isinstance(self.examples, ChatColumn):
            texts = [
                chat_prompt(chat, tokenizer, cell(column, first_row + row, where))
                for row, chat in enumerate(given(rows[column], [rows.features[column]]))
            ]
        else:
            texts = list(rows[column])
        special = not isinstance(self.examples, ChatColumn)  # a chat template writes its own
        found = tokenizer(texts, add_special_tokens=special, return_attention_mask=False, verbose=False)["input_ids"]
        if special:
            found = [without_end(ids, end) for ids in found]
        if self.num_positions is not None:
            max_length = min(max_length, self.num_positions - self.settings.max_new_tokens)
        # An empty prompt begins as a text after another one.
        return {
            "input_ids": [ids[-max_length:] or [end] for ids in found],
            "cut": [len(ids) > max_length for ids in found],
        }

    def _encode_texts(self, texts: list[str], tokenizer: Tokenizer, max_length: int) -> dict[str, list[Any]]:
        """Return the tokens of texts; an empty text has none and is left out."""
        end = end_token(tokenizer)
        texts = [text for text in texts if text]
        features: dict[str, list[Any]] = {"input_ids": [], "labels": []}
        if not texts:
            return features
        for ids in tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"]:
            if ids[-1:] != [end]:
                ids = [*ids, end]
            if self.packing == "joined":
                features["input_ids"].append(ids)
                features["labels"].append(ids)
                continue
            # The end token is only predicted.
            step = max_length if self.packing == "none" else len(ids)
            for start in range(0, len(ids) - 1, step):
                part = ids[start : start + step + 1]
                features["input_ids"].append(part[:-1])
                features["labels"].append(part[1:])
        return features

    def model_inputs(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the inputs of the model; in packed rows, transformers finds the documents from `position_ids`.

        It does so only without an attention mask and without a cache. Padding, at position 0, sees no other token.
        """
        if "position_ids" not in inputs:
            return inputs
        return {name: tensor for name, tensor in inputs.items() if name != "attention_mask"}

    def without_labels(self) -> CausalLMTask:
        examples = self.examples
        if isinstance(examples, CompletionColumns):
            examples = TextColumn(examples.prompt, "prompt")
        return replace(
            self,
            examples=examples,
            packing="none",
            metric_names=(),
            vocabulary_chunk=None,
            train_on="all",
            continues=True,
        )

    def readable(self, answers: Mapping[str, Tensor], split: EvaluatedSplit) -> list[dict[str, Any]]:
        return [{GENERATED: text} for text in generated_texts(answers[GENERATED], split.tokenizer)]
