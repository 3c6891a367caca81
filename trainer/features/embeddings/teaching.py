"""The scores of a teacher, such as a reranker, for the documents of a query, and the losses that learn from them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from trainer.base.errors import DataError
from trainer.tasks.text.columns import cell, finite_number
from trainer.tasks.types import Dataset


def teacher_scores(
    rows: Dataset, column: str, num_documents: int, where: str, first_row: int
) -> list[NDArray[np.float64]]:
    """Return the scores of the documents of each row `[documents]`.

    Raises:
        DataError: a row has another number of scores, or one of them is no finite number.
    """
    found = []
    for place, values in enumerate(rows[column]):
        at = cell(column, first_row + place, where)
        if not isinstance(values, list) or len(values) != num_documents:
            shown = f"has {len(values)}" if isinstance(values, list) else f"is {_shown(values)}"
            raise DataError(
                f"{at} must be a list with a score for each of the {num_documents} documents, but {shown}; correct it"
            )
        numbers = [finite_number(value) for value in values]
        if None in numbers:
            raise DataError(f"{at} must hold finite numbers, but holds {_shown(values[numbers.index(None)])}")
        found.append(np.array(numbers, np.float64))
    return found


def _shown(value: Any) -> str:
    return "null" if value is None else repr(value)


def teacher_losses(
    scores: Tensor, taught: Tensor, divergence: bool, temperature: float, teacher_temperature: float
) -> Tensor:
    """Return the loss of each row `[rows]`.

    It is the mean squared error of the differences between the scores of the first document and each other one
    (MarginMSE, Hofstätter et al. 2020, arXiv:2010.02666). With `divergence`, it is the divergence of the softmax of the
    scores from that of the teacher, times the squared temperature (Hinton et al. 2015, arXiv:1503.02531).

    Args:
        scores: the scores `[rows, documents]`, divided by `temperature`.
        taught: the teacher's scores of the same shape.
    """
    taught = taught.to(scores.dtype)
    if divergence:
        shares = (taught / teacher_temperature).log_softmax(1)
        losses = F.kl_div(scores.log_softmax(1), shares, reduction="none", log_target=True)
        return losses.sum(1) * temperature**2
    margins, expected = (of[:, :1] - of[:, 1:] for of in (scores, taught))
    return (margins - expected).square().mean(1)
