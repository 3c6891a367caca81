"""Reward models: one number for a text, learned from pairs of a better and a worse text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.base.errors import DataError
from trainer.features.preferences.pairs import equal_pairs_notes, require_apart
from trainer.features.preferences.section import RewardModel
from trainer.recipe.schema import TaskKeys
from trainer.tasks.exported import TEXT_CLASSIFICATION
from trainer.tasks.metrics.table import METRICS
from trainer.tasks.preview import RowPreview
from trainer.tasks.several_texts import ScoredTexts
from trainer.tasks.task import Task
from trainer.tasks.text.answers import check_texts_or_chats, end_token, holds_chats, tokens_after, unread_notes
from trainer.tasks.text.columns import cell, cells_of, finite_numbers, framed, require_columns
from trainer.tasks.types import Dataset, Encoded, EncodedRows, EvaluatedSplit, Tokenizer


@dataclass(frozen=True)
class RewardModelTask(ScoredTexts):
    """The loss of Bradley and Terry on the rewards of two texts (Ouyang et al. 2022, arXiv:2203.02155, equation 1)."""

    prompt: str | None  # the column of prompts; None: the other columns hold whole texts or chats
    # the columns of the better texts and of the worse ones; of one text for predictions
    answer_columns: tuple[str, ...]
    margin: str | None  # the column of the differences that the rewards should have; None: there is none
    # The weight of the squared sum of both rewards (Eisenstein et al. 2023, arXiv:2312.09244).
    center_coefficient: float
    metric_names: tuple[str, ...]

    recipe_type = "reward_model"
    card = TEXT_CLASSIFICATION
    unencoded_fields = ("metric_names", "center_coefficient")

    @property
    def preview(self) -> RowPreview:
        return RowPreview(roles=("chosen", "rejected"))

    @classmethod
    def of(cls, section: TaskKeys, **given: Any) -> Task:
        assert isinstance(section, RewardModel)
        return super().of(section, answer_columns=(section.chosen, section.rejected), **given)

    @property
    def columns(self) -> tuple[str, ...]:
        beside = (column for column in (self.prompt, self.margin) if column is not None)
        return (*beside, *self.answer_columns)

    @property
    def value_columns(self) -> tuple[str, ...]:
        return () if self.margin is None else (self.margin,)

    def model_options(self) -> dict[str, Any]:
        return {"num_labels": 1, "problem_type": "regression"}

    def check_columns(self, features: Mapping[str, Any], where: str) -> None:
        keys = {"chosen": self.answer_columns[0]}
        if len(self.answer_columns) > 1:
            keys["rejected"] = self.answer_columns[1]
        check_texts_or_chats(features, {**({"prompt": self.prompt} if self.prompt else {}), **keys}, where)
        if self.margin is not None:
            require_columns(features, [self.margin], "task.margin", where)

    def answer_notes(self, train: EncodedRows) -> list[str]:
        return equal_pairs_notes(train)

    def conversion_notes(self, features: Mapping[str, Any]) -> list[str]:
        is_chat = holds_chats(features[self.answer_columns[0]])
        notes = unread_notes(features, [*self.columns, "margin"], is_chat, takes_tools=False)
        if self.margin is None and "margin" in features and len(self.answer_columns) > 1:
            notes.append("column `margin` is not read; name it in `task.margin` to learn by it")
        return notes

    def encode(self, rows: Dataset, tokenizer: Tokenizer, max_length: int, where: str, first_row: int) -> Encoded:
        """Return the tokens of both texts of each row, with an end token; a chat ends as the template writes it.

        Raises:
            DataError: a cell is null, an answer is empty, or a margin is no number.
            UsageError: the tokenizer has no end token or no chat template.
        """
        cells = cells_of(rows, self.columns, where, first_row)
        prompts = [None] * len(rows) if self.prompt is None else cells[self.prompt]
        texts = [
            [
                self._tokens(prompt, answer, tokenizer, cell(column, first_row + row, where))
                for row, (prompt, answer) in enumerate(zip(prompts, cells[column], strict=True))
            ]
            for column in self.answer_columns
        ]
        of_rows = list(zip(*texts, strict=True))
        shortened = [[ids[:max_length] for ids in of_row] for of_row in of_rows]
        features: Encoded = {
            "input_ids": shortened if len(self.answer_columns) > 1 else [one for (one,) in shortened],
            "cut": [any(len(ids) > max_length for ids in of_row) for of_row in of_rows],
        }
        if len(self.answer_columns) > 1:
            for row, (texts_of_row, is_cut) in enumerate(zip(shortened, features["cut"], strict=True)):
                place = cell(self.answer_columns[0], first_row + row, where)
                require_apart(texts_of_row, is_cut, max_length, place)
        if self.margin is not None:
            features["labels"] = finite_numbers(rows, self.margin, where, first_row)
        return features

    def _tokens(self, prompt: Any, answer: Any, tokenizer: Tokenizer, place: str) -> list[int]:
        if isinstance(answer, str) and prompt is None:
            if not answer.strip():
                raise DataError(f"{place} is empty; fill it, or leave the row out")
            return framed([answer], tokenizer, end_token(tokenizer))[0]
        return tokens_after([] if prompt is None else prompt, answer, tokenizer, None, place)[0]

    def loss_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of rewards `[rows, 2]`; the margins are `[rows]`, or `[rows, 0]` without them."""
        chosen, rejected = logits.unbind(1)
        margins = labels.to(logits.dtype) if self.margin is not None else 0.0
        losses = -F.logsigmoid(chosen - rejected - margins)
        if self.center_coefficient:
            losses = losses + self.center_coefficient * (chosen + rejected).square()
        return losses.sum()

    def predictions(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"rewards": logits.float()}

    def metrics(self, predictions: Mapping[str, Tensor]) -> dict[str, float]:
        chosen, rejected = (of.numpy() for of in predictions["rewards"].double().unbind(1))
        rows = {"accuracy": "reward_accuracy"}
        return {name: METRICS[rows.get(name, name)].compute(chosen, rejected) for name in self.metric_names}

    def baselines(self, labels: Tensor | None, vocabulary: int | None) -> dict[str, float]:
        return {"accuracy": 0.5}

    def without_labels(self) -> RewardModelTask:
        return replace(self, answer_columns=self.answer_columns[:1], margin=None, metric_names=())

    def answers(self, logits: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"rewards": logits.float().squeeze(-1)}

    def readable(self, answers: Mapping[str, Tensor], split: EvaluatedSplit) -> list[dict[str, Any]]:
        return [{"reward": float(f"{value:.6g}")} for value in answers["rewards"].tolist()]

    def empty_batch(self, shape: tuple[int, ...]) -> tuple[dict[str, Tensor], Tensor]:
        return {}, torch.zeros(shape[0]) if self.margin else torch.zeros(shape[0], 0)
