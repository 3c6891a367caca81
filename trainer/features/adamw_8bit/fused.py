"""Operations of AdamW with moments in 8 bits. A Triton kernel computes each in one pass over memory.

`optimizer.py` defines them by operations of torch, and calls these where kernels run. This module imports Triton at
the first launch: see `trainer.parallel.kernel_support`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainer.parallel import kernel_support
from trainer.parallel.launching import Launch, facts_of, launch, operation

_TILE = 1024  # elements of one program: four blocks, one for each warp


@operation(
    "trainer::raise_maxima_8bit",
    "(Tensor(a!) maxima, Tensor gradient, Tensor first, Tensor second, Tensor scales, Tensor[] values, Tensor? blocks,"
    " int width, float[] betas) -> ()",
    lambda tensors: [tensors[0], *tensors[:5]],  # the tables stay in the cache
)
def raise_maxima(
    maxima: Tensor, gradient: Tensor, first: Tensor, second: Tensor, scales: Tensor, values: list[Tensor],
    blocks: Tensor | None, width: int, betas: list[float],
) -> None:  # fmt: skip
    """Raise the maxima of blocks, fp32 `[2, blocks]`, to the new moments of a part; see `update`."""
    if gradient.numel():
        arguments = (
            maxima.view(torch.int32), gradient, first, second, scales, tuple(values), blocks, gradient.numel(),
            scales.shape[1], _shares(betas),
        )  # fmt: skip
        of_tensors = facts_of(maxima, gradient, first, second, scales, blocks)
        facts = ("8-bit maxima", gradient.device, width, *arguments[-3:-1], *of_tensors)
        launch(facts, [arguments], lambda: [Launch(_kernels().maxima_kernel, _grid(gradient), (), _options(width))])


@operation(
    "trainer::adamw_8bit",
    "(Tensor(a!) weight, Tensor gradient, Tensor(b!) first, Tensor(c!) second, Tensor(d!) scales, Tensor[] values,"
    " Tensor? blocks, int width, float[] betas, Tensor[] codes, Tensor? maxima, Tensor corrections, Tensor? flag,"
    " float eps, float decay) -> ()",
    lambda tensors: [tensors[0], *tensors[:5], *tensors[2:5]],
)
def update(
    weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, scales: Tensor, values: list[Tensor],
    blocks: Tensor | None, width: int, betas: list[float], codes: list[Tensor], maxima: Tensor | None,
    corrections: Tensor, flag: Tensor | None, eps: float, decay: float,
) -> None:  # fmt: skip
    """Step the weights of a part and store the codes of its new moments; without `maxima`, their scales too.

    All tensors are contiguous.

    Args:
        weight: the part, fp32, which changes.
        first: the codes of its first moments, int8, which change.
        second: the codes of its second moments, uint8, which change.
        scales: the scales of all blocks of the whole parameter, fp32 `[2, blocks]`.
        values: the numbers of the codes of each moment, fp32 `[256]`.
        blocks: the block of each row of `width` elements, int32; None: row i is block i.
        width: the elements of a row, a divisor of `BLOCK`.
        betas: the shares of the old moments in the new ones.
        codes: the codes of numbers for each moment, by the upper bits of fp32.
        maxima: the largest new moments of whole blocks, fp32 `[2, blocks]`; None: the part is the whole parameter.
        corrections: the learning rate and the factor of second moments in this step, fp32 `[2]`.
        flag: a scalar; nothing changes if it is not 0.
        eps: the number that is added to the root of the second moments.
        decay: the factor of the weights.
    """
    if gradient.numel():
        arguments = (
            weight, gradient, first, second, scales, tuple(values), tuple(codes), blocks, maxima, corrections, flag,
            gradient.numel(), scales.shape[1], _shares(betas), eps, decay,
        )  # fmt: skip
        of_tensors = facts_of(weight, gradient, first, second, scales, blocks, maxima, corrections, flag)
        facts = ("8-bit update", gradient.device, width, gradient.numel(), scales.shape[1], *of_tensors)
        launch(facts, [arguments], lambda: [Launch(_kernels().update_kernel, _grid(gradient), (), _options(width))])


@torch.library.register_fake("trainer::raise_maxima_8bit")  # type: ignore[untyped-decorator]
@torch.library.register_fake("trainer::adamw_8bit")  # type: ignore[untyped-decorator]
def _nothing(*_: Any) -> None:
    """Return nothing, as operations do that change their arguments."""


def _kernels() -> Any:
    from trainer.features.adamw_8bit import adamw_8bit_kernels

    return adamw_8bit_kernels


def _grid(tensor: Tensor) -> tuple[int]:
    return (-(-tensor.numel() // _TILE),)


def _shares(betas: list[float]) -> tuple[float, ...]:
    """Return the shares of the old moment and of the gradient in each new moment."""
    return tuple(share for beta in betas for share in (beta, 1 - beta))


def _options(width: int) -> dict[str, Any]:
    shape = {"WIDTH": width, "ROWS": _TILE // width}
    # A fused product and sum would round once, where torch's operations round twice.
    return shape if kernel_support.is_interpreted() else {**shape, "num_warps": 4, "enable_fp_fusion": False}
