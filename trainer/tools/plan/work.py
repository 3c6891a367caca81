"""The arithmetic of a step as sums that know no hardware: a roofline gives their time on any device.

Source: Williams et al. 2009, "Roofline: an insightful visual performance model for multicore architectures".
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from trainer.parallel.launching import MOVED

FORWARD, BACKWARD, RECOMPUTED, OPTIMIZER_STEP = "forward", "backward", "recomputed", "optimizer"
PHASES = (FORWARD, BACKWARD, RECOMPUTED, OPTIMIZER_STEP)
MATMUL, ATTENTION, SPECIAL, REDUCTION, INTEGER, OTHER, VIEW = (
    "matrix products", "attention", "special functions", "reductions", "integers", "other", "views",
)  # fmt: skip

HOST_WAIT = "host wait"
"""The name of a view that stands for a wait of the host for values of the device."""

_FLASH = "_scaled_dot_product_flash_attention"
_LIKE = {f"{_FLASH}_for_cpu": _FLASH, f"{_FLASH}_for_cpu_backward": f"{_FLASH}_backward"}
_LIKE |= {"addmm_": "addmm", "baddbmm_": "baddbmm", "_scaled_mm_v2": "mm"}
FLOPS = ChainMap(
    {getattr(torch.ops.aten, name): flop_registry[getattr(torch.ops.aten, like)] for name, like in _LIKE.items()}
    # Torch has none. Each row meets one matrix, and each pair of rows adds to one gradient.
    | {torch.ops.aten._grouped_mm: lambda first, second, *_, **__: 2 * first.numel() * second.shape[-1]}
    # Torch's formula does not take the type of the result.
    | {torch.ops.aten.addmm: lambda total, *others, **named: flop_registry[torch.ops.aten.mm](*others, **named)},
    flop_registry,
)
"""Formulas of the floating-point operations of matrix products and attention, by operation; kernels add theirs.

They count all products of an operation. The backward pass of attention kernels computes the scores again.
"""


def _operations(*names: str) -> frozenset[Any]:
    return frozenset(getattr(torch.ops.aten, name) for name in " ".join(names).split())


_LOOKUPS = _operations("embedding index index_select gather")  # read only the rows that they return
_ADDS = _operations("addmm addmm_ baddbmm baddbmm_")  # to their first operand, which may be in fp32
_WRITES_NOTHING = _operations("empty empty_like empty_strided new_empty new_empty_strided detach _unsafe_view")
_OF_ALL_PARAMETERS = ("_fused_adam", "_fused_sgd", "_foreach_")
_SPECIAL = _operations(  # a CPU computes exponentials for each element
    "gelu gelu_backward silu silu_backward tanh exp erf pow",
    "_softmax _softmax_backward_data _log_softmax _log_softmax_backward_data",
)
_REDUCTIONS = _operations(  # read twice much of their input, or across rows
    "sum mean native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward"
)
_CLASSES = dict.fromkeys(_SPECIAL, SPECIAL) | dict.fromkeys(_REDUCTIONS, REDUCTION)


class Kind(NamedTuple):
    """Operations that take about the same time: of one phase, class and type, with sizes within a factor of two."""

    phase: str  # one of `PHASES`
    # `MATMUL`, `ATTENTION`, `SPECIAL` for exponentials, `REDUCTION` for sums and norms, `INTEGER` for those of 64 bits,
    # `OTHER`, or `VIEW` for operations without work on the device
    operation: str
    name: str  # the name of torch's operation; of views, empty or `HOST_WAIT`
    dtype: torch.dtype | None  # the type of the operands
    flops_size: int  # the bits of the floating-point operations of one operation
    bytes_size: int  # the bits of the bytes that one operation reads and writes
    mixed: torch.dtype | None = None  # the type of other operands, which a kernel must convert; None: all have one type


class Amount(NamedTuple):
    """Sums over operations of one kind: their number, floating-point operations, and bytes read and written."""

    number: int
    flops: int  # of all products that the device computes
    num_bytes: int
    model_flops: int = 0  # of the model's products: without recomputation, and without those of the optimizer


NOTHING = Amount(0, 0, 0)
Work = Mapping[Kind, Amount]

_Key = TypeVar("_Key")
_Sum = TypeVar("_Sum", bound=NamedTuple)


def plus(one: _Sum, other: _Sum, times: int = 1) -> _Sum:
    """Return the sum of one named tuple of numbers and `times` the other, which may be negative."""
    return one._make(first + times * second for first, second in zip(one, other, strict=True))


def sum_of(first: Mapping[_Key, _Sum], second: Mapping[_Key, _Sum], times: int = 1) -> dict[_Key, _Sum]:
    """Return the sums of two tables, the second one taken `times` times, which may be negative."""
    total = dict(first)
    for key, amount in second.items():
        # A missing key counts as 0, so its sum is one amount and `times - 1` more.
        total[key] = plus(total[key], amount, times) if key in total else plus(amount, amount, times - 1)
    return total


def _bytes_moved(packet: Any, inputs: list[Tensor], outputs: list[Tensor]) -> int:
    """Return the bytes that an operation reads and writes."""
    read = outputs if packet in _LOOKUPS else inputs
    if packet in MOVED:
        read = MOVED[packet](inputs)
    moved = sum(tensor.numel() * tensor.element_size() for tensor in (*read, *outputs))
    name = packet.__name__
    # An operation on all parameters writes into its inputs; `_foreach_copy_` reads one list and writes the other.
    if outputs or packet in MOVED or not name.startswith(_OF_ALL_PARAMETERS) or name == "_foreach_copy_":
        return moved
    # Fused Adam reads four lists, weights, gradients and two moments, and writes three of them.
    return moved * 7 // 4 if "_fused" in name else moved * 2  # all but the gradients is written too


def _model_flops(phase: str, function: Any, args: Any, kwargs: Any, flops: int) -> int:
    """Return the floating-point operations of the model among the `flops` of one operation.

    The backward pass of attention has twice the model's products of its forward pass, which has the name of the
    operation without "backward". All others that its kernels compute are recomputation.
    """
    if phase not in (FORWARD, BACKWARD) or not flops:
        return 0
    namespace, _, name = function._overloadpacket._qualified_op_name.partition("::")
    forward, is_backward = name.removesuffix("_backward"), name.endswith("_backward")
    if "attention" not in name or not is_backward:
        return flops
    of_namespace = getattr(torch.ops, namespace)
    packet = getattr(of_namespace, forward, None) or getattr(of_namespace, f"{forward}_forward")
    call = {**dict(zip((one.name for one in function._schema.arguments), args, strict=False)), **kwargs}
    # Formulas of torch do not name their first three arguments as the operations do.
    first = [call.pop(key) for key in ("query", "key", "value")]
    names = {one.name for one in packet.default._schema.arguments}
    return 2 * int(FLOPS[packet](*first, **{key: call[key] for key in call if key in names}, out_val=None))


def work_of(
    phase: str, function: Any, args: Any, kwargs: Any, inputs: list[Tensor], outputs: list[Tensor], result: Any
) -> tuple[Kind, Amount]:
    """Return the kind and amount of one operation below autograd."""
    packet = function._overloadpacket
    if function.is_view or packet in _WRITES_NOTHING or not (inputs or outputs):
        return Kind(phase, VIEW, "", None, 0, 0), Amount(1, 0, 0)
    moved, several = _bytes_moved(packet, inputs, outputs), packet.__name__.startswith(_OF_ALL_PARAMETERS)
    formula = FLOPS.get(packet)
    flops = 0 if formula is None else int(formula(*args, **kwargs, out_val=result))
    # A product of 16 bits may have a result in fp32.
    dtype = inputs[packet in _ADDS].dtype if formula is not None else (outputs or inputs)[0].dtype
    if formula is not None:
        operation = ATTENTION if "attention" in packet.__name__ else MATMUL
    else:
        operation = _CLASSES.get(packet, INTEGER if dtype == torch.int64 else OTHER)
    # The size of an operation on all parameters depends on the number of layers; its sums must be linear in it.
    size = 0 if several else moved.bit_length()
    mixed = next((tensor.dtype for tensor in inputs if tensor.dtype != dtype), None)
    kind = Kind(phase, operation, packet.__name__, dtype, flops.bit_length(), size, mixed)
    return kind, Amount(1, flops, moved, _model_flops(phase, function, args, kwargs, flops))
