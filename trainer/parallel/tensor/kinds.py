"""The kinds of sharded and adapted layers, for modules that ask for a kind and do not use the layers."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

ATTRIBUTE = "lora"
"""The name of a low-rank product in its layer."""
ROWS = "trained_rows"
"""The name of trained rows in their layer."""
START = ("start_A", "start_B")
"""The names of the factors with which a trained product began."""


class MatrixProduct(nn.Module):
    """A layer that multiplies by all its parameters.

    A precision with a small range replaces both functions by those of a derived class.
    """

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, transposed: bool = False) -> Tensor:
        """Return `F.linear` of `x` `[..., in]`; the weight is `[out, in]`, or `[in, out]` if `transposed`."""
        return F.linear(x, weight.t() if transposed else weight, bias)

    def add_bias(self, x: Tensor, bias: Tensor) -> Tensor:
        """Return the sum of products `x` `[..., out]` and a bias `[out]`, in the type of the products."""
        return x + bias.to(x.dtype)


PLAIN: set[Any] = {MatrixProduct.multiply}
"""Functions in the place of `multiply` that return `F.linear`; a feature may add its own."""
JOINT = "joint_weight"
"""The attribute of a layer with a weight that it multiplies by in place of its own, for itself and other layers."""


class ShardedLinear(MatrixProduct):
    """A linear layer that is sharded over the tensor ranks."""


class ShardedEmbedding(nn.Module):
    """An embedding that is sharded over the tensor ranks."""


def is_start(name: str) -> bool:
    """Return whether a parameter is a factor of the frozen product with which a trained one began."""
    return name.endswith(tuple(f"{ATTRIBUTE}.{factor}" for factor in START))
