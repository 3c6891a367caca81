"""The kinds of sharded and adapted layers, for modules that ask for a kind and do not use the layers."""

from __future__ import annotations

from torch import nn

ATTRIBUTE = "lora"
"""The name of a low-rank product in its layer."""
ROWS = "trained_rows"
"""The name of trained rows in their layer."""
START = ("start_A", "start_B")
"""The names of the factors with which a trained product began."""


class MatrixProduct(nn.Module):
    """A layer that multiplies by all its parameters."""


class ShardedLinear(MatrixProduct):
    """A linear layer that is sharded over the tensor ranks."""


class ShardedEmbedding(nn.Module):
    """An embedding that is sharded over the tensor ranks."""


def is_start(name: str) -> bool:
    """Return whether a parameter is a factor of the frozen product with which a trained one began."""
    return name.endswith(tuple(f"{ATTRIBUTE}.{factor}" for factor in START))
