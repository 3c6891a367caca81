"""Passes of microbatches as CUDA graphs: the host launches one graph for a microbatch, and not each of its kernels.

A microbatch of a new shape runs eagerly, which compiles its kernels. The next one of this shape is captured, and later
ones replay the graph. A graph reads the memory that it was captured with, so each microbatch is copied into the tensors
of its graph, and gradients stay in place.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trainer.base.errors import UsageError
from trainer.engine.accumulation import Schedule
from trainer.parallel.gradients import OverlappedSums
from trainer.parallel.microbatch import Microbatch, has_padding

MOST_GRAPHS = 64

Capture = Callable[[Callable[[], None]], Callable[[], object]]
"""A function that records the operations of its argument, without running them, and returns their replay."""


def replay_eagerly(function: Callable[[], None]) -> Callable[[], object]:
    """Run the operations in each replay; a `Capture` for plans, which count them."""
    return function


class CudaCapture:
    """Capture CUDA graphs in one pool of memory, because one graph replays at a time and keeps nothing.

    Raises:
        UsageError: the device is no NVIDIA GPU.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise UsageError(
                f"`cuda_graphs` is true, which needs an NVIDIA GPU, but the device is {device.type}; set it to false"
            )
        self._pool: Any = None

    def __call__(self, function: Callable[[], None]) -> Callable[[], object]:
        graph = torch.cuda.CUDAGraph()
        # Threads that pin memory and copies of the next microbatch may use CUDA meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            function()
        self._pool = graph.pool()
        return graph.replay


# Scalars at fixed addresses, because a graph reads and writes the memory that it was captured with.
class _Numbers:
    def __init__(self, denominator: Tensor, scale: Tensor | None) -> None:
        self.denominator = torch.empty_like(denominator)
        self.scale = None if scale is None else torch.empty_like(scale)
        self.total = torch.empty_like(denominator)

    def begin(self, denominator: Tensor, scale: Tensor | None) -> None:
        self.denominator.copy_(denominator)
        if self.scale is not None and scale is not None:
            self.scale.copy_(scale)
        self.total.zero_()


class GraphedSchedule(Schedule):
    """A `Schedule` that replays the forward and backward pass of each microbatch.

    Args:
        dropout_table: returns the dropout keys of the current step on the device of a microbatch, always the same
            tensor until a call of a site is new; None with torch's dropout.
    """

    adds_in_place = True

    def __init__(
        self,
        loss_sum: Callable[[Microbatch], Tensor],
        dropout_table: Callable[[torch.device], Tensor | None],
        capture: Capture,
        sums: OverlappedSums | None = None,
    ) -> None:
        super().__init__(sums)
        self._loss_sum = loss_sum
        self._dropout_table = dropout_table
        self._capture = capture
        self._numbers: _Numbers | None = None
        self._table: Tensor | None = None  # that the graphs read
        self._seen: set[Hashable] = set()
        self._graphs: dict[Hashable, tuple[Microbatch, Callable[[], object]]] = {}

    def run(self, microbatches: Sequence[Microbatch], denominator: Tensor, scale: Tensor | None) -> Tensor:
        # The tensors must live as long as the graphs.
        if self._numbers is None:
            self._numbers = _Numbers(denominator, scale)
        self._numbers.begin(denominator, scale)
        self._sums.begin(len(microbatches) + 1)  # no bucket is complete before `finish`: a replay calls no hook
        for microbatch in microbatches:
            # A graph cannot leave tokens out: the next microbatch of this shape has labels at other places.
            num_labels = microbatch.labels.numel()
            microbatch = replace(microbatch, is_padded=has_padding(microbatch.hidden), num_labels=num_labels)
            shape = _shape(microbatch)
            if shape in self._seen:
                self._replay(shape, microbatch)
            else:
                # An eager pass first: kernels that compile on first use cannot be captured.
                self._pass(microbatch, self._numbers)
                self._seen.add(shape)
        self._sums.finish()
        # The next step sets the fixed tensor to zero, perhaps before the host has read this total.
        return self._numbers.total.clone()

    def _pass(self, microbatch: Microbatch, numbers: _Numbers) -> None:
        loss = self._loss_sum(microbatch) / numbers.denominator
        (loss if numbers.scale is None else loss * numbers.scale).backward()  # type: ignore[no-untyped-call]
        numbers.total.add_(loss.detach())

    def _replay(self, shape: Hashable, microbatch: Microbatch) -> None:
        assert self._numbers is not None
        ready = replace(
            microbatch.to(self._numbers.total.device),
            is_padded=microbatch.is_padded,
            num_labels=microbatch.num_labels,
        )
        table = self._dropout_table(ready.rows.device)
        # A new tensor means that a dropout site got a new call; captured graphs read keys of the old tensor.
        if table is not self._table:
            self._table = table
            self._graphs.clear()
        if shape not in self._graphs:
            if len(self._graphs) == MOST_GRAPHS:
                raise UsageError(
                    f"`cuda_graphs` is true, but microbatches have more than {MOST_GRAPHS} shapes, and each has a"
                    " graph; set `data.pad_to` to a larger number, such as 64, or `cuda_graphs` to false"
                )
            # The copies stay at the addresses of the graph; later microbatches are copied into them.
            inputs = ready.map(torch.clone)
            self._graphs[shape] = inputs, self._captured(inputs)
        inputs, replay = self._graphs[shape]
        # Capturing runs nothing, so the first microbatch of a graph is replayed as well.
        for tensor, new in zip(inputs.tensors, ready.tensors, strict=True):
            tensor.copy_(new)
        replay()

    def _captured(self, microbatch: Microbatch) -> Callable[[], object]:
        numbers = self._numbers
        assert numbers is not None
        try:
            return self._capture(lambda: self._pass(microbatch, numbers))
        except RuntimeError as error:
            raise UsageError(
                f"`cuda_graphs` is true, but a pass of this model cannot be captured ({str(error).splitlines()[0]});"
                " set it to false"
            ) from error


def _shape(microbatch: Microbatch) -> Hashable:
    """Return all that decides the operations of a pass."""
    tensors = [(tuple(tensor.shape), tensor.dtype) for tensor in microbatch.tensors]
    return (*microbatch.inputs, *tensors, microbatch.filler, microbatch.is_padded)
