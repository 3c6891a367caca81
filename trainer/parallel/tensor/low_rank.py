"""LoRA: a trainable product of two low-rank matrices beside a linear layer (Hu et al. 2021, arXiv:2106.09685).

The product is a child module of its layer, so the layer's own parameters keep their names. It works on inputs and
outputs of the layer, and therefore does not depend on the layout of its weight.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.parallel.random import stream_key

ATTRIBUTE = "lora"
"""The name of the product in its layer."""


class LowRank(nn.Module):
    """The product `scaling * B A dropout(x)`, `[..., in] -> [..., out]`, with `A` `[rank, in]` and `B` `[out, rank]`.

    Args:
        A: the first factor.
        B: the second factor.
        scaling: the factor of the product, alpha / rank.
        dropout: the dropout of the input.
    """

    def __init__(self, A: Tensor, B: Tensor, scaling: float, dropout: nn.Module) -> None:  # noqa: N803  # the paper's
        super().__init__()
        self.A = nn.Parameter(A)
        self.B = nn.Parameter(B)
        self.scaling = scaling
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(self.dropout(x), self.A), self.B) * self.scaling

    def extra_repr(self) -> str:
        return f"rank={self.A.shape[0]}, scaling={self.scaling:g}"


def attach(layer: nn.Module, product: LowRank) -> None:
    """Add the product to the outputs of a linear layer."""
    setattr(layer, ATTRIBUTE, product)
    layer.register_forward_hook(_add)


def product_of(layer: nn.Module) -> LowRank | None:
    """Return the product of a layer; None without one."""
    product = getattr(layer, ATTRIBUTE, None)
    return product if isinstance(product, LowRank) else None


def _add(layer: nn.Module, args: Any, output: Tensor) -> Tensor:
    product = product_of(layer)
    assert product is not None, "the hook belongs to a layer with a product"
    added: Tensor = product(args[0])
    return output + added


def drawn_factor(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return the initial value of a factor: `A` uniform, as in a linear layer of torch, and `B` zero.

    Args:
        name: the name of the parameter in the whole model, which ends in A or B; each has its own stream.
        shape: the shape of the whole parameter.
    """
    if name.endswith(".B"):
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(stream_key(seed, "adapter", name))
    return nn.init.kaiming_uniform_(torch.empty(shape), a=math.sqrt(5), generator=generator)
