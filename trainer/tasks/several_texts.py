"""Tasks with several texts in a row, which the model reads one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from itertools import islice
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from trainer.base.errors import UsageError
from trainer.parallel.dtypes import at_least_fp32
from trainer.tasks.task import TextTask
from trainer.tasks.types import Dataset

_ROWS_AT_ONCE = 1000


class SeveralTexts(TextTask):
    """A task with several texts in a row, which an encoder or a decoder reads one by one.

    `recipe_type` is the value of `task.type`.
    """

    recipe_type: ClassVar[str]

    def for_configuration(self, config: Any) -> Self:
        if config.is_encoder_decoder:
            raise UsageError(
                f"`task.type` is {self.recipe_type}, which needs an encoder or a decoder, but the model is of type"
                f" {config.model_type}, which has both; use another model"
            )
        return self

    def model_inputs(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the inputs `[batch * texts, sequence]`."""
        return {name: tensor.flatten(0, -2) for name, tensor in inputs.items()}


def most_texts(rows: Dataset, columns: Sequence[str], texts_of: Callable[[Any], Sized]) -> int:
    """Return the largest number of texts of a row: one in each of several columns, or those of one column's cells."""
    if len(columns) > 1:
        return len(columns)
    batches = rows.select_columns([*columns]).iter(_ROWS_AT_ONCE)
    return max(len(texts_of(value)) for batch in batches for value in batch[columns[0]])


def texts_of_rows(rows: Dataset, columns: Sequence[str], texts_of: Callable[[Any], list[str]]) -> list[list[str]]:
    """Return the texts of each row: those of several columns, or those of one column's cells."""
    if len(columns) > 1:
        return [list(of_row) for of_row in zip(*(rows[name] for name in columns), strict=True)]
    return [texts_of(value) for value in rows[columns[0]]]


def grouped(texts: Iterable[list[int]], counts: Sequence[int], number: int) -> list[list[list[int]]]:
    """Return tokens of texts by row: each row has its count of texts, and texts of one token up to `number`."""
    remaining = iter(texts)
    rows = [list(islice(remaining, count)) for count in counts]
    # One token, because a text without a token has no state to score.
    return [of_row + [of_row[0][:1]] * (number - len(of_row)) for of_row in rows]


_DRAWS = 5
_MOST_DRAWN = 2_000  # rows; more would take seconds at each start


def mean_of_draws(metrics: Callable[[Tensor], Mapping[str, float]], shape: Sequence[int]) -> dict[str, float]:
    """Return the mean metrics of some tensors of normal numbers `[rows, ...]`; none for very many rows."""
    if shape[0] > _MOST_DRAWN:
        return {}
    # A fixed seed and a generator of its own: all ranks get equal baselines, and no other draw changes.
    generator = torch.Generator().manual_seed(0)
    draws = [metrics(torch.randn(*shape, generator=generator)) for _ in range(_DRAWS)]
    return {name: sum(draw[name] for draw in draws) / _DRAWS for name in draws[0]}


class ScoredTexts(SeveralTexts):
    """A task with one number for each text."""

    auto_class_name = "AutoModelForSequenceClassification"

    def scores(self, output: Any, inputs: Mapping[str, Tensor], labels: Tensor | None = None) -> Tensor:
        """Return the numbers `[batch, texts]` in fp32 at least."""
        return at_least_fp32(output.logits).view(len(inputs["input_ids"]), -1)
