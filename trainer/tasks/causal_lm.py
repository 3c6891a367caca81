"""Causal language modelling: texts, completions of prompts, and the assistant's turns of chats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from trainer.base.errors import DataError, UsageError
from trainer.recipe.schema import CausalLM, TaskKeys
from trainer.tasks.exported import GENERATION
from trainer.tasks.generated import required_generator
from trainer.tasks.task import Task
from trainer.tasks.text.answers import (
    Tokens,
    Tools,
    Turns,
    check_texts_or_chats,
    encoder_of_chats,
    end_token,
    features_of,
    features_of_labels,
    holds_chats,
    known_end,
    required_chats,
    tokens_after,
    unread_notes,
)
from trainer.tasks.text.columns import cell, cells_of, framed, is_text, require_columns, require_kind
from trainer.tasks.text.packing import DocumentPacker, Packer, StreamPacker
from trainer.tasks.text.token_ids import LABELS, MASK, TRAINED, columns_of_ids, holds_ids, read_ids
from trainer.tasks.token_labels import TokenLabels
from trainer.tasks.types import Dataset, Encoded, Tokenizer

Packing = Literal["none", "documents", "joined"]

DECODERS = ("gpt2", "llama", "mistral", "qwen2", "qwen3")
"""The model types of the table that predict the next token."""

_ENCODERS = (
    "albert", "bert", "deberta-v2", "distilbert", "electra", "modernbert", "roberta", "xlm-roberta",
)  # fmt: skip


@dataclass(frozen=True)
class CausalLMTask(TokenLabels):
    """Causal language modelling with cross entropy over the vocabulary.

    The label of a token is the next token of its document. `settings` are those of generated texts; None: there are
    none. `num_tokens` is the size of the vocabulary; None: unknown.
    """

    # The columns of texts and chats by their keys in the recipe: `text`, or `prompt` and `completion`, or `messages`.
    sources: Mapping[str, str]
    packing: Packing
    metric_names: tuple[str, ...]
    tools: str | None = None
    beside: tuple[str, ...] = ()  # the columns of masks and labels beside token ids, known after `resolve`
    train_on: Turns = "all"
    settings: Any = None
    num_tokens: int | None = None

    auto_class_name = "AutoModelForCausalLM"
    card = GENERATION

    @classmethod
    def of(cls, section: TaskKeys, **given: Any) -> Task:
        assert isinstance(section, CausalLM)
        return super().of(section, sources=section.sources, **given)

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.sources.values(), *self.beside, *((self.tools,) if self.tools is not None else ()))

    @property
    def trains_all_tokens(self) -> bool:
        """Whether rows are texts or token ids, and neither completions nor chats."""
        return not {"completion", "messages"} & self.sources.keys()

    @property
    def unencoded_fields(self) -> tuple[str, ...]:
        return ("metric_names", "vocabulary", "takes_token_scores", "num_tokens", "settings")

    @property
    def packs_documents(self) -> bool:
        return self.packing == "documents"

    @property
    def keeps_rows(self) -> bool:
        return not self.trains_all_tokens and self.train_on != "each"

    @property
    def head_blocks(self) -> Literal["vocabulary"] | None:
        return "vocabulary"

    @property
    def generation(self) -> Any:
        return self.settings if self.settings and self.settings.model_fields_set else None

    def end_tokens(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        ends = [] if (end := known_end(tokenizer)) is None else [end]
        if "text" not in self.sources and tokenizer.chat_template and (chats := encoder_of_chats()):
            ends += chats.ends(tokenizer)
        return tuple(dict.fromkeys(ends))

    def tokenizer_notes(self, tokenizer: Tokenizer) -> list[str]:
        is_chat = "messages" in self.sources and tokenizer.is_fast
        if not is_chat or not tokenizer.chat_template:
            return []
        return required_chats().notes(tokenizer, self.train_on)

    def conversion_notes(self, features: Mapping[str, Any]) -> list[str]:
        if "text" not in self.sources:
            return unread_notes(
                features, self.columns, any(holds_chats(features[column]) for column in self.sources.values())
            )
        if not self._has_ids(features):
            return []
        beside = " and ".join(f"`{name}`" for name in self.beside)
        notes = [f"column `{self._column}` holds token ids, which are read{f' with {beside}' * bool(beside)}"]
        unread = [name for name in ("position_ids", "seq_lengths") if name in features]
        return notes + [
            f"column `{name}` is not read: documents in a row of token ids see each other" for name in unread
        ]

    def resolve(self, train: Dataset, where: str) -> CausalLMTask:
        self.check_columns(train.features, where)
        if not self._has_ids(train.features):
            return self
        return replace(self, beside=columns_of_ids(train.features, MASK, LABELS, *TRAINED))

    @property
    def _labels(self) -> str | None:
        """The last column that decides which token ids are trained; None: all are."""
        return next((name for name in reversed(self.beside) if name != MASK), None)

    @property
    def _column(self) -> str:
        """The first column: that of texts, of prompts, or of chats."""
        return next(iter(self.sources.values()))

    def _has_ids(self, features: Mapping[str, Any]) -> bool:
        return self.trains_all_tokens and holds_ids(features[self._column])

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
        return replace(self, num_tokens=getattr(config, "vocab_size", None))

    def check_columns(self, features: Mapping[str, Any], where: str) -> None:
        if self.tools is not None:
            require_columns(features, [self.tools], "task.tools", where)
        if "prompt" in self.sources:
            is_chat = check_texts_or_chats(features, self.sources, where)
            if not is_chat and self.tools is not None:
                raise DataError(f"`task.tools` applies to chats, but the prompts of {where} are texts; remove it")
        elif "messages" in self.sources:
            needed = 'a column of lists of {"role": ..., "content": ...}'
            require_kind(features, self._column, "task.messages", where, holds_chats, needed)
        else:
            needed, key = "a column of strings or of token ids", "task.text"
            require_kind(
                features, self._column, key, where, lambda feature: is_text(feature) or holds_ids(feature), needed
            )
            for name in self.beside:
                require_kind(features, name, f"{key} with `{name}`", where, holds_ids, "a column of lists of integers")

    def packer(self, max_length: int) -> Packer | None:
        if self.packing == "none":
            return None
        if self.packing == "joined":
            return StreamPacker(max_length)
        # An answer is not split, because its second part would be trained without its prompt.
        return DocumentPacker(max_length, splits=self.trains_all_tokens and self._labels is None)

    def encode(self, rows: Dataset, tokenizer: Tokenizer, max_length: int, where: str, first_row: int) -> Encoded:
        """Tokenise texts, prompts with completions, or chats; see `TextTask.encode`.

        With `packing`, the result is documents, which `packer` turns into rows. Without it, a text that is longer than
        `max_length` becomes several rows; a prompt with its completion, or a chat, is truncated.

        Raises:
            DataError: a cell is null, a chat or a completion has no token to train, or it is cut by `max_length`.
            UsageError: the tokenizer has no end token or no chat template.
        """
        has_ids = self._has_ids(rows.features)  # `read_ids` checks them for nulls itself
        cells = {} if has_ids else cells_of(rows, self.columns, where, first_row, nullable=self.tools)
        if has_ids:
            return self._encode_ids(rows, max_length, where, first_row)
        if self.trains_all_tokens:
            return self._encode_texts(cells[self._column], tokenizer, max_length)
        encoded: list[tuple[str, Tokens]] = []
        texts = [cells[column] for column in self.sources.values()]
        for row, (first, *others) in enumerate(zip(*texts, strict=True)):
            place = cell(list(self.sources.values())[-1], first_row + row, where)
            tools = self._tools_of(cells, row, tokenizer, where, first_row)
            if others:
                turns = [tokens_after(first, others[0], tokenizer, tools, place)]
            else:
                turns = required_chats().whole(first, tokenizer, self.train_on, place, tools)
            encoded += [(place, tokens) for tokens in turns]
        return features_of(encoded, max_length)

    def _tools_of(self, cells: Mapping[str, Any], row: int, tokenizer: Tokenizer, where: str, first_row: int) -> Tools:
        """Return the tools of a row; None without `task.tools`."""
        if self.tools is None:
            return None
        return required_chats().tools(cells[self.tools][row], tokenizer, cell(self.tools, first_row + row, where))

    def _encode_texts(self, texts: list[str], tokenizer: Tokenizer, max_length: int) -> Encoded:
        end = end_token(tokenizer)
        texts = [text for text in texts if text]
        if not texts:
            return {"input_ids": [], "labels": []}
        return self._windows(framed(texts, tokenizer, end), max_length)

    def _encode_ids(self, rows: Dataset, max_length: int, where: str, first_row: int) -> Encoded:
        """Return rows of token ids: with labels as those of completions, without them as those of texts."""
        encoded = read_ids(rows, self._column, self.beside, self.num_tokens, where, first_row)
        if self._labels is None:
            return self._windows([ids for ids, _ in encoded], max_length)
        places = [cell(self._labels, first_row + row, where) for row in range(len(rows))]
        labelled = [
            (place, (ids, labels)) for place, (ids, labels) in zip(places, encoded, strict=True) if labels is not None
        ]
        return features_of_labels(labelled, max_length)

    def _windows(self, documents: list[list[int]], max_length: int) -> Encoded:
        """Return the rows of documents, in which each token but the first is predicted once."""
        features: Encoded = {"input_ids": [], "labels": []}
        for ids in documents:
            if self.packing == "joined":
                features["input_ids"].append(ids)
                # `StreamPacker` makes the labels from the joined tokens.
                features["labels"].append(ids)
                continue
            # The last token is only predicted.
            # Parts overlap by one token, so that the first token of a part is predicted by the part before.
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
        # With a mask, transformers would not look for documents.
        return {name: tensor for name, tensor in inputs.items() if name != "attention_mask"}

    def without_labels(self) -> Task:  # type: ignore[override]
        """Return the task that continues texts, prompts or chats."""
        return required_generator().continuing(self)
