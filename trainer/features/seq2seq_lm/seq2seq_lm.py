"""Generation of a target text from a source text by an encoder-decoder, as in summarisation and translation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from trainer.base.errors import DataError, UsageError
from trainer.features.seq2seq_lm.metrics import require_packages
from trainer.recipe.schema import TaskKeys
from trainer.tasks.exported import Card
from trainer.tasks.generated import GENERATED, required_generator
from trainer.tasks.metrics.table import METRICS
from trainer.tasks.task import Task
from trainer.tasks.text.columns import bare, cell, filled, frame_of, require_text, tokenise
from trainer.tasks.token_labels import TOKEN_METRICS, TokenLabels
from trainer.tasks.types import Dataset, Encoded, EvaluatedSplit, Tokenizer

_USAGE = """\
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

model = AutoModelForSeq2SeqLM.from_pretrained("path/to/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
inputs = tokenizer(PROMPT, return_tensors="pt")
tokens = model.generate(inputs.input_ids, attention_mask=inputs.attention_mask)
print(tokenizer.decode(tokens[0], skip_special_tokens=True))"""


@dataclass(frozen=True)
class Seq2SeqLMTask(TokenLabels):
    """Cross entropy of the tokens of a target, each from the source and the true tokens before it.

    `target` is None for rows without targets. `settings` are those of generated texts; None: there are none.
    `languages` are those of source and target; None: the tokenizer marks none. `start_token` is the decoder's first
    input; None until `for_configuration` sets it. `forced_token` starts a generated text if it names the language.
    """

    source: str
    target: str | None
    prefix: str
    max_target_length: int
    metric_names: tuple[str, ...]
    settings: Any = None
    languages: tuple[str | None, str | None] = (None, None)
    start_token: int | None = None
    forced_token: int | None = None

    auto_class_name = "AutoModelForSeq2SeqLM"
    card = Card(
        "text2text-generation",
        has_pipeline=False,
        peft_type="SEQ_2_SEQ_LM",
        usage=_USAGE,
        graph='inputs["decoder_input_ids"] = [[FIRST_TOKEN]]  # and the tokens that were generated so far',
    )
    unencoded_fields = ("metric_names", "settings", "vocabulary", "takes_token_scores")
    own_lengths = ("decoder_input_ids", "labels")

    @classmethod
    def of(cls, section: TaskKeys, **given: Any) -> Task:
        return super().of(section, languages=section.languages, **given)

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.source,) if self.target is None else (self.source, self.target)

    @property
    def head_blocks(self) -> Literal["vocabulary"] | None:
        return None if self.target is None else "vocabulary"

    @property
    def generates(self) -> bool:
        return self.target is None or any(name not in TOKEN_METRICS for name in self.metric_names)

    @property
    def generation(self) -> Any:
        return self.settings

    @property
    def _is_multilingual(self) -> bool:
        return self.languages != (None, None)

    @property
    def first_tokens(self) -> dict[str, int | None]:
        if not self._is_multilingual:
            return {}
        return {"decoder_start_token_id": self.start_token, "forced_bos_token_id": self.forced_token}

    def resolve(self, train: Dataset, where: str) -> Seq2SeqLMTask:
        self.check_columns(train.features, where)
        require_packages(self.metric_names)
        return self

    def for_configuration(self, config: Any) -> Seq2SeqLMTask:
        start = getattr(config, "decoder_start_token_id", None)
        if start is None:
            raise UsageError(
                f"`task.type` is seq2seq_lm, which needs the decoder's first token, but the model of type"
                f" {config.model_type} names none; set `decoder_start_token_id` in its configuration"
            )
        positions = getattr(config, "max_position_embeddings", None)
        lengths = {"max_target_length": self.max_target_length}
        if self.settings is not None:
            lengths["generation.max_new_tokens"] = self.settings.max_new_tokens
        for key, length in lengths.items():
            if positions is not None and length > positions:
                raise UsageError(
                    f"`task.{key}` must be at most the {positions} positions of the model's decoder, but is {length}"
                )
        forced = config.forced_bos_token_id if self._is_multilingual else None
        return replace(self, start_token=start, forced_token=forced)

    def check_columns(self, features: Mapping[str, Any], where: str) -> None:
        require_text(features, [self.source], where, "task.source")
        if self.target is not None:
            require_text(features, [self.target], where, "task.target")

    def encode(self, rows: Dataset, tokenizer: Tokenizer, max_length: int, where: str, first_row: int) -> Encoded:
        blank = next((row for row, text in enumerate(rows[self.source]) if text is not None and not text.strip()), None)
        if blank is not None:
            raise DataError(f"{cell(self.source, first_row + blank, where)} is an empty text; leave the row out")
        features = tokenise(rows, [self.source], tokenizer, max_length, where, first_row, self.prefix)
        features = {name: features[name] for name in ("input_ids", "cut")}  # T5 takes no token types
        if self.target is None:
            return features
        texts = filled(rows, self.target, where, first_row, "every row needs a target, which may be an empty text")
        labels, cut = self._labels(texts, tokenizer)
        assert self.start_token is not None, "call `for_configuration` first"
        # The decoder reads the labels one place later, as `shift_tokens_right` of transformers makes them.
        starts = [[self.start_token, *row[:-1]] for row in labels]
        return {**features, "labels": labels, "decoder_input_ids": starts, "cut_target": cut}

    def split_metrics(self, predictions: Mapping[str, Tensor], split: EvaluatedSplit) -> dict[str, float]:
        targets = np.array([text.strip() for text in split.rows[self.target]], object) if self.generates else None
        texts = np.array(_texts(predictions[GENERATED], split.tokenizer), object) if self.generates else None
        return {
            name: self.token_metric(name, predictions)
            if name in TOKEN_METRICS
            else METRICS[name].compute(texts, targets)
            for name in self.metric_names
        }

    def picture(self, predictions: Mapping[str, Tensor], split: EvaluatedSplit | None) -> dict[str, Any] | None:
        if not self.generates or self.target is None or split is None:
            return None
        few = split.few.select_columns([self.source, self.target])
        texts = _texts(predictions[GENERATED][: len(few)], split.tokenizer)
        return {"texts": [{**row, GENERATED: text} for row, text in zip(few, texts, strict=True)]}

    def without_labels(self) -> Seq2SeqLMTask:
        return replace(self, target=None, metric_names=())

    def readable(self, answers: Mapping[str, Tensor], split: EvaluatedSplit) -> list[dict[str, Any]]:
        return [{GENERATED: text} for text in _texts(answers[GENERATED], split.tokenizer)]

    def _labels(self, texts: Sequence[str], tokenizer: Tokenizer) -> tuple[list[list[int]], list[bool]]:
        """Return the tokens of each target with its end token, and whether it was truncated."""
        end = tokenizer.eos_token_id
        if end is None:
            raise UsageError(
                f"the tokenizer `{tokenizer.name_or_path}` has no end token, at which the generation of a text stops;"
                ' add "eos_token" to the `tokenizer_config.json` of a copy and name its folder in `model.tokenizer`'
            )
        start, behind = frame_of(tokenizer, is_target=True)
        frame = [*start, *behind]
        ends = end in frame if self._is_multilingual else frame[-1:] == [end]  # a language may follow the end token
        behind = behind if ends else [*behind, end]
        room = self.max_target_length - len(start) - len(behind)
        if not 0 < room <= max(tokenizer.model_max_length - len(frame), 1):
            raise UsageError(
                f"`task.max_target_length` must be more than the {len(start) + len(behind)} special tokens of a target"
                f" and at most the {tokenizer.model_max_length} tokens that the tokenizer allows for its model, but is"
                f" {self.max_target_length}"
            )
        found = tokenizer(
            text_target=bare(texts, tokenizer, start, behind),
            add_special_tokens=False,
            return_attention_mask=False,
            verbose=False,
        )["input_ids"]
        return [[*start, *ids[:room], *behind] for ids in found], [len(ids) > room for ids in found]

    def empty_batch(self, shape: tuple[int, ...]) -> tuple[dict[str, Tensor], Tensor]:
        target = torch.zeros(shape[0], min(shape[1], self.max_target_length), dtype=torch.long)
        return {"decoder_input_ids": target}, target.clone()


def _texts(generated: Tensor, tokenizer: Tokenizer | None) -> list[str]:
    return [text.strip() for text in required_generator().texts(generated, tokenizer)]
