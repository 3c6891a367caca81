"""The products of experts: one arithmetic for every layout, in place of transformers' functions.

Rows of tokens are sorted by expert, and each expert multiplies its rows:

    y_t = sum_k w_tk down_e(act(gate_e(x_t)) * up_e(x_t)),  e = index_tk

The sum over k is in the order of the router's choices, so it depends on no other token.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from trainer.features.experts.counts import RowCounts
from trainer.features.experts.exchange import exchanged_counts, nothing, to_rank
from trainer.features.experts.quantized import rows_times_stored
from trainer.models.checkpointing import kept_result
from trainer.parallel.device_traits import traits_of
from trainer.parallel.dtypes import NARROW, at_least_fp32, product_in_fp32
from trainer.parallel.stored_in_parts import StoredInParts
from trainer.parallel.tensor.kinds import ATTRIBUTE

EXPERT_GROUP = "expert_group"
"""The attribute of a module of experts with the ranks that divide them."""
BESIDE = "beside_message"
"""The attribute of a module of experts with the function that it calls while tokens are under way."""
EXPERT_PRODUCTS = "expert_products"
"""The name of `experts_forward` in transformers' table."""
_GROUPED_CAPABILITY = (8, 0)
ALIGNED = 8
"""The elements in 16 bits that the grouped kernel reads at once."""


def experts_forward(experts: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of the outputs of the chosen experts, `[tokens, H]`.

    Args:
        experts: a module that transformers decorates by `use_experts_implementation`.
        hidden: the tokens `[tokens, H]`.
        index: the experts of each token `[tokens, k]`.
        weights: their weights `[tokens, k]`.
    """
    order, counts = sorted_by_expert(index, experts.num_experts)
    # Rounded before they travel, as the products would round them.
    rows = hidden[order // index.shape[-1]].to(product_dtype(hidden))
    group = getattr(experts, EXPERT_GROUP, None)
    if group is None:
        rows = expert_products(experts, rows, RowCounts(counts, len(rows), _is_grouped(experts, rows)))
    else:
        rows = _divided_products(experts, rows, counts, group)
    return weighted_sum(rows, order, weights, hidden.dtype)


def _divided_products(experts: Any, rows: Tensor, counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the outputs of all experts for the rows of this rank, which travel to the ranks with their experts."""
    of_ranks, sent, received = kept_result(partial(exchanged_counts, counts, len(rows), group))
    sizes = [sum(row) for row in sent], [sum(row) for row in received]
    rows = to_rank(rows, *sizes, group, getattr(experts, BESIDE, nothing))
    # They come by rank, then by expert; equal experts of all ranks are joined.
    owner = torch.arange(of_ranks.shape[1], device=rows.device).repeat(len(of_ranks))
    order = owner.repeat_interleave(of_ranks.flatten(), output_size=len(rows)).argsort(stable=True)
    on_host = [sum(numbers) for numbers in zip(*received, strict=True)]
    joined = RowCounts(of_ranks.sum(0), len(rows), _is_grouped(experts, rows), on_host)
    outputs = expert_products(experts, rows[order], joined)
    return to_rank(outputs[inverse(order)], sizes[1], sizes[0], group)


def sorted_by_expert(index: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the order of the choices `[tokens * k]`, sorted by expert, and the number of rows of each `[experts]`."""
    chosen = index.flatten()
    counts = torch.zeros(num_experts, dtype=torch.int64, device=chosen.device)
    # Unlike `bincount`, it does not let the host wait for a GPU.
    return chosen.argsort(stable=True), counts.scatter_add_(0, chosen, torch.ones_like(chosen))


def weighted_sum(rows: Tensor, order: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum over the experts of each token, `[tokens, H]`.

    Args:
        rows: the outputs `[tokens * k, H]`, sorted by expert.
        order: the choice that each row belongs to; see `sorted_by_expert`.
        weights: the weights `[tokens, k]`.
    """
    outputs = rows[inverse(order)].view(*weights.shape, rows.shape[-1])
    summed: Tensor = (outputs * weights.unsqueeze(-1)).sum(1)
    return summed.to(dtype)


def inverse(order: Tensor) -> Tensor:
    """Return the permutation that undoes `order`."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the type of products of `x`: autocast rounds operands of products, but does not know those of experts."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def expert_products(experts: Any, rows: Tensor, counts: RowCounts) -> Tensor:
    """Return the outputs of experts for rows that are sorted by expert, `[n, H]`, without the router's weights.

    Args:
        experts: the module with the matrices.
        rows: the rows `[n, H]`: those for the first expert, then those of the next ones.
        counts: the number of rows of each expert.
    """
    hidden = _expert_linear(experts, "gate_up_proj" if experts.has_gate else "up_proj", rows, counts)
    hidden = experts._apply_gate(hidden) if experts.has_gate else experts.act_fn(hidden)
    hidden = _expert_linear(experts, "down_proj", hidden, counts)
    return cast(Tensor, experts.post_expert_norm(hidden)) if experts.has_post_expert_norm else hidden


def _expert_linear(experts: Any, name: str, rows: Tensor, counts: RowCounts) -> Tensor:
    """Return the rows, multiplied by the matrix `name` of their expert, with its bias `[n, out]`."""
    weight = getattr(experts, name)
    bias = getattr(experts, f"{name}_bias") if experts.has_bias else None
    rows = rows.to(product_dtype(rows))
    if isinstance(weight, StoredInParts):
        outputs = rows_times_stored(rows, weight, counts.on_host, experts.is_transposed)
    else:
        outputs = rows_times(rows, weight, counts, experts.is_transposed)
    products = getattr(experts, ATTRIBUTE, {})
    if name in products:
        outputs = outputs + products[name](rows, counts)
    return outputs if bias is None else _with_bias(outputs, bias, counts)


def rows_times(rows: Tensor, weight: Tensor, counts: RowCounts, transposed: bool = False) -> Tensor:
    """Return rows in the type of products, multiplied by the matrix of their expert, `[n, out]`.

    Args:
        weight: the matrices `[experts, out, in]`, or `[experts, in, out]` if `transposed`; the grouped kernel needs
            multiples of `ALIGNED`.
        counts: the number of rows of each expert.
    """
    if counts.is_grouped:
        matrix = weight.to(rows.dtype)
        ends = counts.on_device.cumsum(0).to(torch.int32)
        return F.grouped_mm(rows, matrix if transposed else matrix.transpose(1, 2), offs=ends)
    return cast(Tensor, _EachExpert.apply(rows, weight, counts.on_host, transposed))  # type: ignore[no-untyped-call]


def _with_bias(rows: Tensor, bias: Tensor, counts: RowCounts) -> Tensor:
    if counts.is_grouped:
        places = torch.repeat_interleave(counts.on_device, output_size=len(rows))
        return rows + bias[places].to(rows.dtype)
    return cast(Tensor, _EachBias.apply(rows, bias, counts.on_host))  # type: ignore[no-untyped-call]


def _is_grouped(experts: Any, rows: Tensor) -> bool:
    """Return whether torch has a grouped kernel for the device, type and sizes of products."""
    if traits_of(rows.device).is_cpu or product_dtype(rows) != torch.bfloat16:
        return False
    is_aligned = all(size % ALIGNED == 0 for size in experts.down_proj.shape[1:])
    # A plan has the device's operations, and no device.
    return is_aligned and (rows.device.type == "cpu" or torch.cuda.get_device_capability() >= _GROUPED_CAPABILITY)


class _EachExpert(torch.autograd.Function):
    """One product for each expert; an expert without rows has a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, sizes: list[int], transposed: bool) -> Tensor:
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, weight)
        ctx.sizes, ctx.transposed = sizes, transposed
        matrix = weight.to(rows.dtype)
        output = rows.new_empty(len(rows), matrix.shape[2 if transposed else 1])
        for part, own, out in zip(torch.split(rows, sizes), matrix, torch.split(output, sizes), strict=True):
            if len(part):
                torch.mm(part, own if transposed else own.t(), out=out)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        gradients = torch.split(gradient.contiguous(), ctx.sizes)
        of_rows = of_weight = None
        if ctx.needs_input_grad[0]:
            matrix = weight.to(gradient.dtype)
            of_rows = gradient.new_empty(len(gradient), matrix.shape[1 if ctx.transposed else 2])
            for part, own, out in zip(gradients, matrix, torch.split(of_rows, ctx.sizes), strict=True):
                if len(part):
                    torch.mm(part, own.t() if ctx.transposed else own, out=out)
        if ctx.needs_input_grad[1]:
            # A weight that ranks gathered in fp16 gets its gradient in fp32.
            dtype = torch.float32 if weight.dtype == NARROW else weight.dtype
            of_weight = torch.zeros(weight.shape, dtype=dtype, device=weight.device)
            for own, part, out in zip(torch.split(rows, ctx.sizes), gradients, of_weight, strict=True):
                if len(part):
                    first, second = (own, part) if ctx.transposed else (part, own)
                    # In fp16, a sum over rows could overflow; see `features/fp16`.
                    is_narrow = gradient.dtype == NARROW
                    out.copy_(product_in_fp32(first.t(), second) if is_narrow else first.t() @ second)
        return of_rows, of_weight, None, None


class _EachBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor, sizes: list[int]) -> Tensor:
        ctx.sizes, ctx.dtype = sizes, bias.dtype
        parts = zip(torch.split(rows, sizes), bias.to(rows.dtype), strict=True)
        return torch.cat([part + own for part, own in parts])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        sums = [at_least_fp32(part).sum(0) for part in torch.split(gradient, ctx.sizes)]
        return gradient, torch.stack(sums).to(ctx.dtype), None


def use_products(model: Any) -> None:
    """Let the experts of a model compute by `experts_forward`."""
    model.config._experts_implementation = EXPERT_PRODUCTS


ALL_EXPERTS_FUNCTIONS.register(EXPERT_PRODUCTS, experts_forward)
