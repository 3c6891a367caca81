"""A stand-in for CUDA graphs on a CPU: a tape of operations, which reads and writes the memory of its recording.

As a CUDA graph does, it holds all numbers of the host, refuses to read a number of the device, and does not run the
recorded function's Python code again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from tests.helpers.reads import READS


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in READS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {function}")
        result = function(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]
        self.calls.append((function, args, kwargs or {}, tensors))
        return result


class TapeCapture:
    """The `Capture` of a tape; `kept` are tensors that a recording must leave as they are."""

    def __init__(self, kept: Callable[[], Sequence[Tensor]]) -> None:
        self._kept = kept
        self.num_captures = 0
        self.num_replays = 0

    def __call__(self, function: Callable[[], None]) -> Callable[[], object]:
        kept = [tensor for tensor in self._kept() if tensor is not None]
        before = [tensor.clone() for tensor in kept]
        recording = _Recording()
        with recording:
            function()
        for tensor, old in zip(kept, before, strict=True):
            tensor.copy_(old)
        self.num_captures += 1
        return lambda: self._replay(recording)

    @torch.no_grad()
    def _replay(self, recording: _Recording) -> None:
        self.num_replays += 1
        made: dict[int, Tensor] = {}
        for function, args, kwargs, results in recording.calls:
            now = tree_map_only(Tensor, lambda tensor: made.get(id(tensor), tensor), (args, kwargs))
            found = function(*now[0], **now[1])
            for old, new in zip(results, [x for x in tree_flatten(found)[0] if isinstance(x, Tensor)], strict=True):
                made[id(old)] = new
