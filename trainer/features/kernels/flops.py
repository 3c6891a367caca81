"""Formulas of the floating-point operations of the attention kernels, for counters and plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.flop_counter import register_flop_formula


def product_flops(call: Mapping[str, Any]) -> tuple[int, int]:
    """Return the FLOPs of products of all queries and keys over the head's size, and over that of the values.

    Joined rows have the pairs of their rows and their window. A causal mask saves none, as in torch's formulas.
    """
    query, lengths, window = call["query"], call.get("lengths"), call.get("window")
    pairs = query[0] * query[2] * call["key"][2]
    if lengths is not None:
        hidden = [0 if window is None else max(0, length - 1 - window) for length in lengths]
        # The window hides two triangles of pairs, one after and one before each query.
        pairs = sum(length * length - rows * (rows + 1) for length, rows in zip(lengths, hidden, strict=True))
    products = 2 * query[1] * pairs
    return products * query[3], products * call["value"][3]


def backward_flops(call: Mapping[str, Any]) -> int:
    """Return the FLOPs of the products that the kernels compute; each of them computes the scores again."""
    over_head, over_value = product_flops(call)
    of_bias = int(call["with_bias"])
    # The kernel of queries computes 2 and 1 of these products, that of keys 2 and 2, and that of a bias 1 and 1.
    return (4 + of_bias) * over_head + (3 + of_bias) * over_value


def register(operation: Any, formula: Callable[[Mapping[str, Any]], int]) -> None:
    """Register a formula that gets the arguments of a call by their names, tensors as their shapes.

    Arguments with the value of their default may be missing.
    """
    names = [argument.name for argument in operation.default._schema.arguments]

    @register_flop_formula(operation)
    def count(*arguments: Any, out_shape: Any = None, **named: Any) -> int:
        return formula({**dict(zip(names, arguments, strict=False)), **named})
