"""A check that the host reads no value of a tensor of the device, for which it would wait for a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.nonzero.default,
}
"""Operations that return values of a tensor to the host, or shapes that depend on values."""


class NoReads(TorchDispatchMode):
    """A context in which the host may read integers only, such as labels; those of a batch are on the host."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function not in READS or args[0].dtype == torch.int64, "the host reads a number of the device"
        return function(*args, **(kwargs or {}))
