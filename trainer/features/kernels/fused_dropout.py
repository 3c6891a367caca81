"""Layout-invariant dropout as one operation of torch, computed by a Triton kernel in one pass over memory.

The mask is that of `trainer.parallel.random`. The backward pass draws it again, so none is kept.

The layer norm that follows is not fused. In BERT-base (bf16, 32 rows of 128 tokens) this would save 48 of 582
operations and 0.6 of 18.2 GB, as the norm keeps its input anyway. Its sums would have another order than torch's,
so the results would not be those of the eager function bit for bit.

This module imports Triton at the first call: see `trainer.parallel.kernel_support`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.parallel import kernel_support
from trainer.parallel.launching import Launch, facts_of, launch, operation
from trainer.parallel.random import LANE_LEVELS, LANES, MAX_INDEX_DIMS, dropped_levels

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST_WORDS = 256  # of one program


def takes(x: Tensor, residual: Tensor | None) -> bool:
    """Return whether the operation takes activations and a residual."""
    return x.dtype in _DTYPES and (residual is None or (residual.dtype in _DTYPES and residual.shape == x.shape))


@operation(
    "trainer::keyed_dropout",
    "(Tensor x, Tensor row_keys, Tensor? token_rows, Tensor? token_positions, SymInt[] offsets, float probability,"
    " ScalarType dtype, Tensor? residual) -> Tensor",
)
def _dropped(
    x: Tensor, row_keys: Tensor, token_rows: Tensor | None, token_positions: Tensor | None, offsets: Sequence[int],
    probability: float, dtype: torch.dtype, residual: Tensor | None,
) -> Tensor:  # fmt: skip
    """Drop elements of `x`, scale the kept ones by 1 / (share kept), and add a residual.

    Args:
        x: the activations `[batch, ..., features]` or their gradient, with at most four dimensions. A batch of one may
            be missing.
        row_keys: the keys of the rows for this call of the site, int64 `[batch]`.
        token_rows: the row of each token of rows that are joined, int64 `[tokens]`. `x` is then `[1, tokens,
            features]`, and `row_keys` are those of the rows. Tokens from the end of these on are dropped by the key 0.
        token_positions: the position of each token in its row, int64 `[tokens]`.
        offsets: the start of `x` in each dimension of the activations of one process.
        probability: the share to drop, in [0, 1).
        dtype: the type in which elements are dropped; that of `x` with a residual.
        residual: is added, of the shape of `x`.

    Returns:
        The result, contiguous, of the type of the sum.
    """
    output: Tensor = _empty_result(x, row_keys, token_rows, token_positions, offsets, probability, dtype, residual)
    if output.numel() == 0:
        return output
    x, row_keys = x.contiguous(), row_keys.contiguous()

    def plan() -> list[Launch]:
        num_columns = x.shape[-1]
        between, first = _of_two(x.shape[1 - len(offsets) : -1], 1), _of_two(offsets[1:-1], 0)
        # The first word may begin before this slice; `START` of its lanes are left out.
        num_words = (offsets[-1] % LANES + num_columns + LANES - 1) // LANES
        words = min(_MOST_WORDS, 1 << (num_words - 1).bit_length())
        levels = dropped_levels(probability)
        numbers = (
            0 if token_rows is None else len(token_rows), *between, *first, num_columns, offsets[-1] // LANES,
            levels - LANE_LEVELS // 2, LANE_LEVELS / (LANE_LEVELS - levels),
        )  # fmt: skip
        grid = (x.numel() // num_columns, -(-num_words // words))
        constants = {"START": offsets[-1] % LANES, "WORDS": words, **_options(words)}
        return [Launch(_kernels().dropout_kernel, grid, numbers, constants)]

    added = None if residual is None else residual.contiguous()
    facts = ("dropout", x.device, output.dtype, *offsets, probability, *facts_of(x, added, token_rows))
    launch(facts, [(x, output, added, row_keys, token_rows, token_positions)], plan)
    return output


@torch.library.register_fake("trainer::keyed_dropout")  # type: ignore[untyped-decorator]
def _empty_result(
    x: Tensor, row_keys: Tensor, token_rows: Tensor | None, token_positions: Tensor | None, offsets: Sequence[int],
    probability: float, dtype: torch.dtype, residual: Tensor | None,
) -> Tensor:  # fmt: skip
    return x.new_empty(x.shape, dtype=dtype if residual is None else torch.promote_types(dtype, residual.dtype))


@operation("trainer::row_keys")
def row_keys(keys: Tensor, rows: Tensor) -> Tensor:
    """Return `trainer.parallel.random.row_keys` for the rows of a microbatch and for the row 0, which all share.

    Args:
        keys: the keys of calls, int64 `[calls, 1]`.
        rows: the index of each row in its global batch, int64 `[batch]`.

    Returns:
        The keys, int64 `[calls, batch + 1]`.
    """
    output: Tensor = _empty_row_keys(keys, rows)

    def plan() -> list[Launch]:
        grid = (-(-output.numel() // _MOST_WORDS),)
        return [Launch(_kernels().row_keys_kernel, grid, output.shape, {"SIZE": _MOST_WORDS, **_options(_MOST_WORDS)})]

    rows = rows.contiguous()
    launch(("row keys", rows.device, *facts_of(keys, rows)), [(keys, rows, output)], plan)
    return output


@torch.library.register_fake("trainer::row_keys")  # type: ignore[untyped-decorator]
def _empty_row_keys(keys: Tensor, rows: Tensor) -> Tensor:
    return keys.new_empty((len(keys), len(rows) + 1))


class KeyedDropout(torch.autograd.Function):
    """The operation with its gradient, which is the operation on the gradient; only keys are saved."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, row_keys: Tensor, token_rows: Tensor | None, token_positions: Tensor | None,
        offsets: Sequence[int], probability: float, dtype: torch.dtype, residual: Tensor | None,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(row_keys, token_rows, token_positions)
        # The gradient is dropped in the type of `x`, and has no residual.
        ctx.numbers = (offsets, probability, x.dtype, None)
        ctx.of_residual = None if residual is None else residual.dtype
        output: Tensor = _dropped(x, row_keys, token_rows, token_positions, offsets, probability, dtype, residual)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        # A node of its own only for gradients of gradients.
        drop = KeyedDropout.apply if torch.is_grad_enabled() else _dropped
        own: Tensor = drop(gradient, *ctx.saved_tensors, *ctx.numbers)  # type: ignore[no-untyped-call]
        return own, *[None] * 6, None if ctx.of_residual is None else gradient.to(ctx.of_residual)


def _kernels() -> Any:
    from trainer.features.kernels import dropout_kernels

    return dropout_kernels


def _of_two(numbers: Sequence[int], default: int) -> tuple[int, ...]:
    return (*numbers, *[default] * (MAX_INDEX_DIMS - len(numbers)))


def _options(words: int) -> dict[str, Any]:
    # A fused product and sum would round once, where torch's operations round twice.
    warps = max(1, min(4, words // 32))
    return {} if kernel_support.is_interpreted() else {"num_warps": warps, "enable_fp_fusion": False}
