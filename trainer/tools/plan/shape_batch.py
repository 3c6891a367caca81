"""A batch without data: the shapes of one rank's rows in one optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import torch
from torch import Tensor

from trainer.models.input_samples import samples_of
from trainer.parallel.flat_rows import FlatRows
from trainer.parallel.microbatch import Microbatch, RankBatch
from trainer.recipe.plan import BatchPlan
from trainer.recipe.schema import Recipe
from trainer.tasks.task import Task
from trainer.tools.plan.ledger import BATCH, Ledger


def blank_batch(recipe: Recipe, task: Task, config: Any, batch: BatchPlan, length: int) -> RankBatch:
    """Return the batch of a rank on which every row has `length` tokens.

    A target has at most `task.max_target_length`.

    Raises:
        UsageError: a registered task does not have the method `empty_batch`.
    """
    length = ceil(length / recipe.data.pad_to) * recipe.data.pad_to
    sizes = [batch.micro_batch_size] * batch.num_microbatches
    # The last microbatch may have fewer rows.
    sizes[-1] -= sum(sizes) - batch.rank_batch_size
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    microbatches = [
        _blank(recipe, task, config, size, length, start) for size, start in zip(sizes, starts, strict=True) if size > 0
    ]
    rows = batch.global_batch_size
    return RankBatch(microbatches, rows, rows * length)


def _blank(recipe: Recipe, task: Task, config: Any, rows: int, length: int, start: int) -> Microbatch:
    inputs: dict[str, Tensor] = {}
    texts, other = recipe.task.texts_per_row, recipe.task.other_inputs
    shape: tuple[int, ...] = (rows,)
    if samples := None if other is None else samples_of(other.name):
        inputs |= samples.blank(config, rows)
    else:
        shape = (rows, texts, length) if texts else (rows, length)
        inputs["input_ids"] = torch.zeros(shape, dtype=torch.long)
        inputs["attention_mask"] = torch.ones(shape, dtype=torch.long)
        if task.packs_documents:
            inputs["position_ids"] = (torch.arange(length) % ceil(length / 2)).repeat(rows, 1)  # two documents a row
        else:
            inputs["attention_mask"][..., :1, -1] = 0  # some models need no mask, and less memory, without padding
        if (getattr(config, "type_vocab_size", None) or 0) > 1:
            inputs["token_type_ids"] = torch.zeros(shape, dtype=torch.long)
    further, labels = task.empty_batch(shape)
    flat = None
    if recipe.data.padding_free:  # the padding of a blank mask cannot be read
        flat = FlatRows.of([length] * (inputs["input_ids"].numel() // length), length, torch.device("cpu"))
    inputs |= further
    num_labels = ceil(task.labelled_share * labels.numel())
    return Microbatch(inputs, labels, torch.arange(start, start + rows), flat=flat, num_labels=num_labels)


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
