"""Operations of AdamW over a list of tensors. A Triton kernel computes each in one pass over memory.

This module imports Triton at the first launch: see `trainer.parallel.kernel_support`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainer.parallel import kernel_support
from trainer.parallel.launching import Launch, facts_of, launch, operation

TILE = 1024
"""The elements of one program of the update."""
_TENSORS = 128  # of one program that computes corrections
_BEFORE_LISTS = 4  # tensors before the lists of `update`


def _moved(tensors: list[Tensor]) -> list[Tensor]:
    """Return the tensors that an update reads or writes."""
    number = (len(tensors) - _BEFORE_LISTS) // 5
    lists = tensors[_BEFORE_LISTS : _BEFORE_LISTS + 5 * number]
    return [*lists, *lists[:number], *lists[2 * number : 4 * number]]  # weights and moments are read and written


@operation(
    "trainer::adamw_corrections",
    "(Tensor(a!) corrections, Tensor(b!) steps, Tensor words, Tensor groups, Tensor settings, Tensor? flag) -> ()",
    lambda tensors: [*tensors, tensors[1]],
)
def find_corrections(
    corrections: Tensor, steps: Tensor, words: Tensor, groups: Tensor, settings: Tensor, flag: Tensor | None
) -> None:
    """Count a step of each tensor with a gradient, and compute the factors of its update.

    Args:
        corrections: is filled, fp32 `[3, n]`: the factor of the weights, the negative learning rate divided by the
            correction of first moments, and the root of the correction of second moments.
        steps: the number of steps of each tensor, fp32 `[n]`, which rises.
        words: see `update`.
        groups: the group of each tensor, int32 `[n]`.
        settings: both betas, and the weight decay of each group, fp64 `[2 + groups]`.
        flag: a scalar; if it is not 0, no step counts.
    """
    arguments = (corrections, steps, words, groups, settings, flag)
    facts = ("adamw corrections", steps.device, *facts_of(*arguments))

    def plan() -> list[Launch]:
        grid = (-(-len(steps) // _TENSORS),)
        return [Launch(_kernels().corrections_kernel, grid, (len(steps),), {"TILE": _TENSORS, **_options(1)})]

    launch(facts, [arguments], plan)


@operation(
    "trainer::_fused_adamw_rounded",
    "(Tensor words, Tensor corrections, Tensor table, Tensor owners, Tensor(a!)[] weights, Tensor[] gradients,"
    " Tensor(b!)[] first, Tensor(c!)[] second, Tensor(d!)[] copies, Tensor? flag, Tensor? factor, float[] betas,"
    " float eps, ScalarType rounded) -> ()",
    _moved,
)
def update(
    words: Tensor, corrections: Tensor, table: Tensor, owners: Tensor, weights: list[Tensor], gradients: list[Tensor],
    first: list[Tensor], second: list[Tensor], copies: list[Tensor], flag: Tensor | None, factor: Tensor | None,
    betas: list[float], eps: float, rounded: torch.dtype,
) -> None:  # fmt: skip
    """Step the weights of all tensors, and round them.

    The kernel reads the addresses in `words` and `table`. The lists name the same tensors for those who count
    operations.

    Args:
        words: for each tensor, the address of its gradient (0: none), that of its copy (0: none), and whether the
            gradient is of the type `rounded`, int64 `[3 * n]`; then the learning rate of each group, as bits of fp64.
        corrections: see `find_corrections`.
        table: for each tensor, the addresses of weight, first and second moments, the number of elements, the elements
            of a row of its copy and the distance of rows (0 and 0: the copy is contiguous), and the first program of
            the tensor, int64 `[7, n]`.
        owners: the tensor of each program, int32; a program has `TILE` elements.
        flag: a scalar; nothing changes if it is not 0.
        factor: a scalar that multiplies the gradients, fp32; None: 1.
    """
    arguments = (words, corrections, table, owners, flag, factor)
    facts = ("adamw", words.device, len(owners), rounded, *betas, eps, *facts_of(*arguments))

    def plan() -> list[Launch]:
        # As torch rounds the numbers of Python: from fp64 to the type of the weights.
        numbers = (corrections.shape[1], 1 - betas[0], betas[1], 1 - betas[1], eps)
        import triton.language as tl

        constants = {
            "ROUNDED": tl.float16 if rounded == torch.float16 else tl.bfloat16,
            "LERPS_UP": 1 - betas[0] < 0.5,  # `torch.lerp` begins at the nearer end
            "TILE": TILE,
            "INTERPRETED": kernel_support.is_interpreted(),
            **_options(4),
        }
        return [Launch(_kernels().update_kernel, (len(owners),), numbers, constants)]

    if len(owners):
        launch(facts, [arguments], plan)


@torch.library.register_fake("trainer::adamw_corrections")  # type: ignore[untyped-decorator]
@torch.library.register_fake("trainer::_fused_adamw_rounded")  # type: ignore[untyped-decorator]
def _nothing(*_: Any) -> None:
    """Return nothing, as operations do that change their arguments."""


def _kernels() -> Any:
    from trainer.features.adamw_kernel import adamw_kernels

    return adamw_kernels


def _options(warps: int) -> dict[str, Any]:
    # A fused product and sum would round once, where torch's operations round twice.
    return {} if kernel_support.is_interpreted() else {"num_warps": warps, "enable_fp_fusion": False}
