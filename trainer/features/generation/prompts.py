"""The continuation of texts, prompts and chats by causal language models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from trainer.base.errors import UsageError
from trainer.features.generation.section import Generation
from trainer.tasks.causal_lm import CausalLMTask
from trainer.tasks.generated import GENERATED, required_generator
from trainer.tasks.text.answers import end_token, holds_chats, required_chats
from trainer.tasks.text.columns import cell, cells_of, framed, require_columns
from trainer.tasks.text.token_ids import holds_ids, read_ids
from trainer.tasks.types import Dataset, Encoded, EvaluatedSplit, Tokenizer


@dataclass(frozen=True)
class ContinuingTask(CausalLMTask):
    """Generation of texts that continue those of the only column in `sources`.

    `num_positions` is the maximum number of tokens that the model reads; None: unknown.
    """

    num_positions: int | None = None

    generates = True
    head_blocks = None

    @property
    def unencoded_fields(self) -> tuple[str, ...]:
        return tuple(name for name in super().unencoded_fields if name != "settings")

    @property
    def generation(self) -> Generation:
        settings: Generation = self.settings
        return settings

    def tokenizer_notes(self, tokenizer: Tokenizer) -> list[str]:
        return []

    def for_configuration(self, config: Any) -> ContinuingTask:
        super().for_configuration(config)
        positions = getattr(config, "max_position_embeddings", None)
        if positions is not None and self.settings.max_new_tokens >= positions:
            raise UsageError(
                f"`task.generation.max_new_tokens` must be below the {positions} positions of the model, but is"
                f" {self.settings.max_new_tokens}; lower it"
            )
        return replace(self, num_positions=positions, num_tokens=getattr(config, "vocab_size", None))

    def check_columns(self, features: Mapping[str, Any], where: str) -> None:
        if self.tools is not None:
            require_columns(features, [self.tools], "task.tools", where)
        CausalLMTask.check_columns(replace(self, tools=None), features, where)  # prompts that are texts need no tools

    def encode(self, rows: Dataset, tokenizer: Tokenizer, max_length: int, where: str, first_row: int) -> Encoded:
        """Return the tokens of prompts; those of a long prompt are its last ones, which the generated text follows.

        A chat is the prompt of its next turn of the assistant. If that is its last turn, it is left out.
        """
        column = self._column
        end, feature = end_token(tokenizer), rows.features[column]
        if holds_ids(feature):  # `read_ids` checks them for nulls itself
            read = read_ids(rows, column, (), self.num_tokens, where, first_row)
            found = [_without_end(ids, end) for ids, _ in read]
        elif holds_chats(feature):
            texts = self._prompts_of_chats(rows, tokenizer, where, first_row)
            # Its template writes the special tokens.
            found = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        else:
            found = framed(cells_of(rows, self.columns, where, first_row, nullable=self.tools)[column], tokenizer)
        if self.num_positions is not None:
            # Prompt and generated text share the positions of the model.
            max_length = min(max_length, self.num_positions - self.settings.max_new_tokens)
        # An empty prompt begins as a text after another one.
        return {
            # The last tokens, because the generated text follows them.
            "input_ids": [ids[-max_length:] or [end] for ids in found],
            "cut": [len(ids) > max_length for ids in found],
        }

    def _prompts_of_chats(self, rows: Dataset, tokenizer: Tokenizer, where: str, first_row: int) -> list[str]:
        cells = cells_of(rows, self.columns, where, first_row, nullable=self.tools)
        return [
            required_chats().prompt(
                chat,
                tokenizer,
                cell(self._column, first_row + row, where),
                self._tools_of(cells, row, tokenizer, where, first_row),
            )
            for row, chat in enumerate(cells[self._column])
        ]

    def without_labels(self) -> ContinuingTask:
        return self

    def readable(self, answers: Mapping[str, Tensor], split: EvaluatedSplit) -> list[dict[str, Any]]:
        return [{GENERATED: text} for text in required_generator().texts(answers[GENERATED], split.tokenizer)]


def _without_end(ids: list[int], end: int) -> list[int]:
    return ids[:-1] if ids[-1:] == [end] else ids
