"""Softmax, loss and gradient over a vocabulary as operations of torch, computed by a Triton kernel.

This module imports Triton at the first launch: see `trainer.parallel.kernel_support`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainer.parallel import kernel_support
from trainer.parallel.launching import Launch, facts_of, launch, operation
from trainer.parallel.microbatch import IGNORED_LABEL

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST_COLUMNS = 8192  # of one block; a warp has 512 of them


def takes(logits: Tensor) -> bool:
    """Return whether the operations take logits."""
    return logits.dtype in _DTYPES


@operation("trainer::row_statistics")
def statistics(logits: Tensor, labels: Tensor, num_columns: int, start: int, vocabulary: int) -> Tensor:
    """Return `trainer.features.chunked_head.rows.statistics`; the loss of a label outside of the vocabulary is NaN.

    Args:
        logits: contiguous `[rows, width]`.
        labels: int64 `[rows]`.
        num_columns: the number of columns without padding.
        start: the token of the first column.
        vocabulary: the number of tokens on all ranks.
    """
    found: Tensor = _empty_statistics(logits, labels, num_columns, start, vocabulary)
    _launch(logits, labels, found, None, (num_columns, start, vocabulary), True, False)
    return found


@torch.library.register_fake("trainer::row_statistics")  # type: ignore[untyped-decorator]
def _empty_statistics(logits: Tensor, labels: Tensor, num_columns: int, start: int, vocabulary: int) -> Tensor:
    return logits.new_empty((3, len(logits)), dtype=torch.float32)


@operation(
    "trainer::write_row_gradients",
    "(Tensor(a!) logits, Tensor labels, Tensor statistics, Tensor? gradients, SymInt num_columns, SymInt start,"
    " SymInt vocabulary) -> ()",
    lambda tensors: [tensors[0], *tensors],
)
def write_gradients(
    logits: Tensor, labels: Tensor, found: Tensor, gradients: Tensor | None, num_columns: int, start: int,
    vocabulary: int,
) -> None:  # fmt: skip
    """Replace logits by the gradients of their losses, times `gradients` of the losses `[rows]`, if given."""
    _launch(logits, labels, found, gradients, (num_columns, start, vocabulary), False, True)


@operation(
    "trainer::row_losses_and_gradients",
    "(Tensor(a!) logits, Tensor labels, SymInt num_columns, SymInt start, SymInt vocabulary) -> Tensor",
    lambda tensors: [tensors[0], *tensors],
)
def statistics_and_gradients(logits: Tensor, labels: Tensor, num_columns: int, start: int, vocabulary: int) -> Tensor:
    """Return `statistics` and replace logits by the gradients of their losses, in one launch."""
    found: Tensor = _empty_statistics(logits, labels, num_columns, start, vocabulary)
    _launch(logits, labels, found, None, (num_columns, start, vocabulary), True, True)
    return found


@torch.library.register_fake("trainer::write_row_gradients")  # type: ignore[untyped-decorator]
def _nothing(*_: Any) -> None:
    """Return nothing, as an operation does that changes its argument."""


torch.library.register_fake("trainer::row_losses_and_gradients")(_empty_statistics)


def _launch(
    logits: Tensor, labels: Tensor, found: Tensor, gradients: Tensor | None, numbers: tuple[int, ...], finds: bool,
    writes: bool,
) -> None:  # fmt: skip
    rows, width = logits.shape
    if not rows:
        return

    def plan() -> list[Launch]:
        from trainer.features.chunked_head.row_kernels import rows_kernel

        block = min(_MOST_COLUMNS, 1 << (width - 1).bit_length())
        constants = {"IGNORED": IGNORED_LABEL, "FINDS": finds, "WRITES": writes, "BLOCK": block}
        options = {} if kernel_support.is_interpreted() else {"num_warps": max(1, min(16, block // 512))}
        return [Launch(rows_kernel, (rows,), (rows, width, *numbers), {**constants, **options})]

    facts = ("vocabulary", logits.device, *numbers, finds, writes, *facts_of(logits, labels, gradients))
    launch(facts, [(logits, labels, found, gradients)], plan)
