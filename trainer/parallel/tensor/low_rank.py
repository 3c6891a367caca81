"""LoRA: a trainable product of two low-rank matrices beside a linear layer (Hu et al. 2021, arXiv:2106.09685).

The product is a child module of its layer, so the layer's own parameters keep their names. It works on inputs and
outputs of the layer. Only DoRA reads the layer's weight, for the norms of its rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.parallel.communication import in_product_type, reduce_from_group
from trainer.parallel.groups import Group
from trainer.parallel.random import stream_key
from trainer.parallel.stored_in_parts import LinearInParts
from trainer.parallel.tensor.kinds import ATTRIBUTE, START, MatrixProduct


class Magnitude(nn.Module):
    """The trained norms of the rows of an adapted weight, `[out]` (DoRA, Liu et al. 2024, arXiv:2402.09353).

    A module of its own, because autocast does not round its weight.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, norms: Tensor) -> Tensor:
        """Return the factors `[out]` of the outputs, for the present norms of the rows."""
        return self.weight / norms


@dataclass(frozen=True)
class Base:
    """The layer below a product."""

    weight: Callable[[], Tensor]  # a function that returns its weight `[out, in]`
    product: Callable[[Tensor], Tensor]  # the function from an input to its output without the bias
    bias: Tensor | None  # the bias in its output, which the norms do not scale

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> Base:
        """Return the base with a weight `[out, in]`."""
        return cls(lambda: weight, lambda x: F.linear(x, weight), bias)


class Factors(MatrixProduct):
    """The trained factors of low-rank products: `A` `[..., rank, in]` and `B` `[..., out, rank]`."""

    def __init__(self, A: Tensor, B: Tensor, scaling: float) -> None:  # noqa: N803  # the paper's
        super().__init__()
        self.A = nn.Parameter(A)
        self.B = nn.Parameter(B)
        self.rank, self.scaling = A.shape[-2], scaling  # ZeRO-3 takes the shapes away

    def extra_repr(self) -> str:
        return f"rank={self.rank}, scaling={self.scaling:g}"


class LowRank(Factors):
    """The product `scaling * B A dropout(x)`, `[..., in] -> [..., out]`, with `A` `[rank, in]` and `B` `[out, rank]`.

    With `magnitude`, the rows of the adapted weight are scaled to trained norms (DoRA). The gradient takes the present
    norms as constants, as section 4.3 of the paper proposes.

    With a `start`, a frozen product of the same scaling is subtracted, without dropout. The layer so computes as before
    while the factors are equal to their start.

    Args:
        magnitude: the norms of the rows; None: the norms are not trained.
        start: the factors of the frozen product; None: there is none.
        group: the ranks that share the inputs of the layer, for the norms of whole rows.
    """

    def __init__(
        self,
        A: Tensor,  # noqa: N803  # the paper's
        B: Tensor,  # noqa: N803
        scaling: float,
        dropout: nn.Module,
        magnitude: Magnitude | None = None,
        start: tuple[Tensor, Tensor] | None = None,
        group: Group = None,
    ) -> None:
        super().__init__(A, B, scaling)
        for name, factor in zip(START, start or (None, None), strict=True):
            self.register_parameter(name, None if factor is None else nn.Parameter(factor, requires_grad=False))
        self.dropout = dropout
        self.magnitude = magnitude
        self.group = group

    @property
    def start(self) -> tuple[Tensor, Tensor] | None:
        """The factors of the frozen product; None without one."""
        first, second = (getattr(self, name) for name in START)
        return None if first is None else (first, second)

    def forward(self, x: Tensor, output: Tensor, base: Base) -> Tensor:
        """Return the adapted output of a layer.

        Args:
            x: the input of the layer, `[..., in]`.
            output: the output of the layer, `[..., out]`.
            base: the layer, which only the norms need.
        """
        dropped = self.dropout(x)
        product = self._product(dropped, self.A, self.B)
        if self.magnitude is None:
            return self._without_start(output, x) + product
        factors: Tensor = self.magnitude(self._norms(base.weight()))
        unchanged = self._without_start(output if base.bias is None else output - base.bias, x)
        # Without dropout, the layer has computed its product with this input already.
        if dropped is x:
            changed = factors * (unchanged + product)
        else:
            of_dropped = self._without_start(base.product(dropped), dropped)
            # The layer's own output has no dropout; the change by the norms has the mask of the product.
            changed = unchanged + (factors - 1) * of_dropped + factors * product
        return (changed if base.bias is None else changed + base.bias).to(output.dtype)

    def _product(self, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return self.multiply(self.multiply(x, first), second) * self.scaling

    def _without_start(self, output: Tensor, x: Tensor) -> Tensor:
        return output if self.start is None else output - self._product(x, *self.start)

    @torch.no_grad()
    def _norms(self, weight: Tensor) -> Tensor:
        """Return the norms `[out]` of the rows of the adapted weight, in fp32, without a matrix `[out, in]`.

        |w + c b A|^2 = |w|^2 + 2 c b (A w) + c^2 b (A A^T) b^T for a row w, its row b of B, and the scaling c. Each
        term is a sum over the inputs, so ranks that share them add their parts.
        """
        weight, first, second, *start = map(in_product_type, (weight, self.A, self.B, *(self.start or ())))
        with torch.autocast(weight.device.type, enabled=False):
            # The two products together are one of twice the rank, since `start` is subtracted.
            if start:
                first, second = torch.cat([first, start[0]]), torch.cat([second, -start[1]], dim=1)
            # In 16 bits, the squares would lose the small terms of the product.
            weight, first, second = weight.float(), first.float(), second.float() * self.scaling
            squares = torch.linalg.vector_norm(weight, dim=1).square()
            squares = squares + (second * (2 * (weight @ first.t()) + second @ (first @ first.t()))).sum(dim=1)
            squares = reduce_from_group(squares, self.group)
            return squares.clamp_min(torch.finfo(squares.dtype).tiny).sqrt()  # a padding row of a head is zero


def attach(layer: nn.Module, product: LowRank, transposed: bool = False) -> None:
    """Add the product to the outputs of a linear layer; `transposed`: its weight is `[in, out]`."""
    # As a child of the layer, so that the product moves, shards and is named with it.
    setattr(layer, ATTRIBUTE, product)
    layer.register_forward_hook(partial(_add, transposed=transposed))


def product_of(layer: nn.Module) -> LowRank | None:
    """Return the product of a layer; None without one."""
    product = getattr(layer, ATTRIBUTE, None)
    return product if isinstance(product, LowRank) else None


def _add(layer: Any, args: Any, output: Tensor, transposed: bool) -> Tensor:
    product = product_of(layer)
    assert product is not None, "the hook belongs to a layer with a product"
    if isinstance(layer, LinearInParts):
        base = Base(lambda: layer.weight.decoded(output.dtype), layer.product, layer.bias)
    else:
        base = Base.of(layer.weight.t() if transposed else layer.weight, layer.bias)
    adapted: Tensor = product(args[0], output, base)
    return adapted


def drawn_factor(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return the initial value of a factor: `A` uniform, as in a linear layer of torch, and `B` zero.

    Args:
        name: the name of the parameter in the whole model, which ends in A or B; each has its own stream.
        shape: the shape of the whole parameter.
    """
    if name.endswith(".B"):
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(stream_key(seed, "adapter", name))
    # With this `a`, the bound is 1 / sqrt(inputs).
    rows = torch.empty(prod(shape[:-1]), shape[-1])  # of all matrices, if there are several
    return nn.init.kaiming_uniform_(rows, a=math.sqrt(5), generator=generator).view(shape)
