"""A batch without data: the shapes of one rank's rows in one optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import torch
from torch import Tensor

from trainer.base.errors import UsageError
from trainer.parallel.joined_rows import PackedTokens
from trainer.parallel.microbatch import Microbatch, RankBatch
from trainer.recipe.plan import BatchPlan, texts_of_a_row
from trainer.recipe.schema import (
    CausalLM,
    Embedding,
    ImageClassification,
    MaskedLM,
    MultipleChoice,
    Preference,
    QuestionAnswering,
    Recipe,
    Reranker,
    RewardModel,
    Seq2SeqLM,
    SequenceClassification,
    SequenceRegression,
    TokenClassification,
)
from trainer.tasks.task import Task
from trainer.tools.plan.ledger import BATCH, Ledger


def blank_batch(recipe: Recipe, task: Task, config: Any, batch: BatchPlan, length: int) -> RankBatch:
    """Return the batch of a rank on which every row has `length` tokens.

    A target has at most `task.max_target_length`.

    Raises:
        UsageError: the inputs of the task are unknown, because it is registered by an extension.
    """
    length = ceil(length / recipe.data.pad_to) * recipe.data.pad_to
    sizes = [batch.micro_batch_size] * batch.num_microbatches
    sizes[-1] -= sum(sizes) - batch.rank_batch_size
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    microbatches = [
        _blank(recipe, task, config, size, length, start) for size, start in zip(sizes, starts, strict=True) if size > 0
    ]
    rows = batch.global_batch_size
    return RankBatch(microbatches, rows, rows * length)


def _blank(recipe: Recipe, task: Task, config: Any, rows: int, length: int, start: int) -> Microbatch:
    section = recipe.task
    inputs: dict[str, Tensor] = {}
    if isinstance(section, ImageClassification):
        size = getattr(config, "image_size", None) or 224
        height, width = (size, size) if isinstance(size, int) else size
        inputs["pixel_values"] = torch.zeros(rows, config.num_channels, height, width)
    else:
        texts = texts_of_a_row(section)
        shape = (rows, texts, length) if texts else (rows, length)
        inputs["input_ids"] = torch.zeros(shape, dtype=torch.long)
        inputs["attention_mask"] = torch.ones(shape, dtype=torch.long)
        if isinstance(section, MultipleChoice):
            inputs["num_choices"] = torch.full((rows,), shape[1])
        if isinstance(section, Preference):
            inputs |= _beside_answers(section, shape)
        if isinstance(section, CausalLM) and section.packing == "documents":
            inputs["position_ids"] = (torch.arange(length) % ceil(length / 2)).repeat(rows, 1)  # two documents a row
        else:
            inputs["attention_mask"][..., :1, -1] = 0  # some models need no mask, and less memory, without padding
        if (getattr(config, "type_vocab_size", None) or 0) > 1:
            inputs["token_type_ids"] = torch.zeros(shape, dtype=torch.long)
    labels: Tensor
    match section:
        case Seq2SeqLM():
            target = (rows, min(length, section.max_target_length))
            inputs["decoder_input_ids"] = torch.zeros(target, dtype=torch.long)
            labels = torch.zeros(target, dtype=torch.long)
        case Embedding(mask_duplicates=True):
            labels = torch.zeros(rows, texts_of_a_row(section) or 1, dtype=torch.long)
        case Embedding():
            labels = torch.zeros(rows) if section.score else torch.zeros(rows, 0)
        case RewardModel():
            labels = torch.zeros(rows) if section.margin else torch.zeros(rows, 0)
        case Preference():
            labels = torch.zeros(rows, 2, length, dtype=torch.long)
        case Reranker():
            labels = torch.zeros(rows, texts_of_a_row(section) or 1, dtype=torch.float64)
        case QuestionAnswering():
            labels = torch.zeros(rows, 2, dtype=torch.long)
        case MaskedLM() | CausalLM() | TokenClassification():
            labels = torch.zeros(rows, length, dtype=torch.long)
        case SequenceRegression():
            labels = torch.zeros(rows)
        case SequenceClassification(multi_label=True):
            labels = torch.zeros(rows, task.model_options()["num_labels"])
        case SequenceClassification() | ImageClassification() | MultipleChoice():
            labels = torch.zeros(rows, dtype=torch.long)
        case _:
            raise UsageError(
                f"`task.type` is {section.type}, which `trainer plan` does not support yet: the shapes of its"
                " inputs are unknown"
            )
    packed = None
    if recipe.data.packing:  # the padding of a blank mask cannot be read
        packed = PackedTokens.of([length] * (inputs["input_ids"].numel() // length), length, torch.device("cpu"))
    return Microbatch(inputs, labels, torch.arange(start, start + rows), packed=packed, num_labels=labels.numel())


def _beside_answers(section: Preference, shape: tuple[int, ...]) -> dict[str, Tensor]:
    beside: dict[str, Tensor] = {"reference": torch.zeros(shape[:2])} if section.loss.has_reference else {}
    if section.loss.type == "orpo":
        beside["answer"] = torch.ones(shape, dtype=torch.long)
    if section.loss.type == "kto":
        beside["desirable"] = torch.zeros(shape[0], dtype=torch.long)
    return beside


def copied_ahead(batch: RankBatch, ledger: Ledger) -> RankBatch:
    """Return a batch with its copies on a GPU: that of the present passes, and the next one, which a run makes ahead.

    The copy of the first one begins in the step before.
    """
    copies = _Copies(batch.microbatches, ledger)
    ahead = [replace(one, ahead=_Copy(copies, index)) for index, one in enumerate(batch.microbatches)]
    return replace(batch, microbatches=ahead)


class _Copies:
    def __init__(self, microbatches: Sequence[Microbatch], ledger: Ledger) -> None:
        self._microbatches, self._ledger = microbatches, ledger
        self._following: dict[int, Microbatch] = {}

    def take(self, index: int) -> Microbatch:
        present, following = self._following.pop(index, None), (index + 1) % len(self._microbatches)
        self._following.clear()
        with self._ledger.creating(BATCH):
            self._following[following] = self._microbatches[following].map(torch.empty_like)
            return present or self._microbatches[index].map(torch.empty_like)


@dataclass(frozen=True)
class _Copy:
    copies: _Copies
    index: int

    def take(self) -> Microbatch:
        return self.copies.take(self.index)
