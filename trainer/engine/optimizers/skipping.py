"""Updates that a flag on the device skips, so that the host need not wait for it; see `EngineOptimizer.found_inf`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def unchanged_if(flag: Tensor | None, *tensors: Tensor) -> Iterator[None]:
    """Undo the changes of `tensors` in this context if the flag is not 0; a copy of each lives meanwhile.

    Args:
        flag: a scalar on the device of the tensors; None: they change.
        tensors: plain tensors, perhaps views.
    """
    before = [] if flag is None else [tensor.clone() for tensor in tensors]
    yield
    if flag is not None:
        is_bad = flag.bool()
        for tensor, old in zip(tensors, before, strict=True):
            # A selection, not a product with the flag: 0 times nan is nan.
            torch.where(is_bad, old, tensor, out=tensor)


def write_unless(flag: Tensor | None, tensors: Sequence[Tensor], old: Tensor, new: Tensor) -> None:
    """Copy new values into tensors, or nothing if the flag is not 0.

    Args:
        flag: a scalar on the device of the tensors; None: they change.
        tensors: plain tensors of one shape, perhaps views.
        old: their values `[n, *shape]`, perhaps their memory.
        new: their new values `[n, *shape]`, which are overwritten.
    """
    if flag is not None:
        torch.where(flag.bool(), old, new, out=new)
    torch._foreach_copy_(list(tensors), list(new.unbind()))
