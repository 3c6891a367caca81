"""A stand-in for CUDA graphs on a CPU: a tape of operations, which reads and writes the memory of its recording.

As a CUDA graph does, it holds all numbers of the host, refuses to read a number of the device, and does not run the
recorded function's Python code again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from tests.helpers.reads import READS


class Watching(TorchDispatchMode):
    """A mode that changes no operation; compiled code runs in a recording if its first call was in this mode."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class _Recording(Watching):
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
    """The `Capture` of a tape.

    Args:
        kept: returns tensors that a recording must leave as they are.
        results: returns tensors that outlive a recording; replays write those that it made to their memory.
    """

    def __init__(self, kept: Callable[[], Sequence[Tensor]], results: Callable[[], Sequence[Tensor]]) -> None:
        self._kept, self._results = kept, results
        self.num_captures = 0
        self.num_replays = 0
        self._cuts: list[tuple[int, Callable[[], object]]] = []  # of the running recording: operations before each
        self._recording: _Recording | None = None
        self.events: list[str | int] = []  # of all replays: the operations of each part, and calls of `sums`
        self.added: list[int] = []  # for each recording, the number of `results` that it adds to in place

    def __call__(self, function: Callable[[], None]) -> Callable[[], object]:
        kept = [tensor for tensor in self._kept() if tensor is not None]
        before = [tensor.clone() for tensor in kept]
        self._recording, self._cuts = recording, cuts = _Recording(), []
        with recording:
            function()
        for tensor, old in zip(kept, before, strict=True):
            tensor.copy_(old)
        self.num_captures += 1
        # The recording holds its tensors, so that no other tensor has the memory of one of them.
        last = {_place(tensor): tensor for *_, tensors in recording.calls for tensor in tensors}
        places = {id(last[_place(tensor)]): tensor for tensor in self._results() if _place(tensor) in last}
        ends = {tensor.data_ptr() for tensor in self._results()}
        calls = (call for call in recording.calls if call[0] is torch.ops.aten.add_.Tensor)
        self.added.append(sum(arguments[0].data_ptr() in ends for _, arguments, *_ in calls))
        return lambda: self._replay(recording, places, cuts)

    def cut(self, between: Callable[[], object]) -> None:
        assert self._recording is not None
        self._cuts.append((len(self._recording.calls), between))

    def beside(self) -> AbstractContextManager[object]:
        self.events.append("sums")
        return nullcontext()

    def join(self) -> None:
        self.events.append("join")

    @torch.no_grad()
    def _replay(
        self, recording: _Recording, places: dict[int, Tensor], cuts: list[tuple[int, Callable[[], object]]]
    ) -> None:
        self.num_replays += 1
        made: dict[int, Tensor] = {}
        start = 0
        for end, between in cuts:
            self._replay_part(recording.calls[start:end], places, made)
            between()
            start = end
        self._replay_part(recording.calls[start:], places, made)

    def _replay_part(
        self, calls: list[tuple[Any, Any, Any, list[Tensor]]], places: dict[int, Tensor], made: dict[int, Tensor]
    ) -> None:
        self.events.append(len(calls))
        for function, args, kwargs, results in calls:
            now = tree_map_only(Tensor, lambda tensor: made.get(id(tensor), tensor), (args, kwargs))
            found = function(*now[0], **now[1])
            for old, new in zip(results, [x for x in tree_flatten(found)[0] if isinstance(x, Tensor)], strict=True):
                made[id(old)] = new
                if id(old) in places:
                    places[id(old)].copy_(new)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()
