"""Passes of microbatches as CUDA graphs: the host launches one graph for a microbatch, and not each of its kernels.

A microbatch of a new shape runs eagerly, which compiles its kernels. The next one of this shape is captured, and later
ones replay the graph. A graph reads the memory that it was captured with, so each microbatch is copied into the tensors
of its graph.

Two graphs belong to a shape. That of the first microbatch of a step writes gradients, that of later ones adds to them.
The first graph of all allocates the gradients in the memory of its activations; the other graphs use the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from trainer.base.errors import UsageError
from trainer.engine.accumulation import Schedule
from trainer.parallel.gradients import OverlappedSums
from trainer.parallel.microbatch import Microbatch, has_padding

MOST_SHAPES = 64

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
    """A `Schedule` that replays the forward and backward pass of each microbatch. Gradients are None before a step.

    Args:
        parameters: the parameters of the model.
        dropout_table: returns the dropout keys of the current step on the device of a microbatch, always the same
            tensor until a call of a site is new; None with torch's dropout.
    """

    def __init__(
        self,
        loss_sum: Callable[[Microbatch], Tensor],
        parameters: Iterable[nn.Parameter],
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
        self._graphs: dict[tuple[Hashable, bool], tuple[Microbatch, Callable[[], object]]] = {}
        self._trained = [parameter for parameter in parameters if parameter.requires_grad]
        self._used: list[nn.Parameter] = []  # parameters that an eager pass gave a gradient
        # Gradients at the addresses that graphs read and write; empty before the first graph.
        self._gradients: dict[nn.Parameter, Tensor] = {}
        for parameter in self._trained:
            parameter.register_post_accumulate_grad_hook(self._move)  # type: ignore[no-untyped-call]

    def run(self, microbatches: Sequence[Microbatch], denominator: Tensor, scale: Tensor | None) -> Tensor:
        # The tensors must live as long as the graphs.
        if self._numbers is None:
            self._numbers = _Numbers(denominator, scale)
        self._numbers.begin(denominator, scale)
        self._sums.begin(len(microbatches) + 1)  # no bucket is complete before `finish`: a replay calls no hook
        for index, microbatch in enumerate(microbatches):
            # A graph cannot leave tokens out: the next microbatch of this shape has labels at other places.
            num_labels = microbatch.labels.numel()
            microbatch = replace(microbatch, is_padded=has_padding(microbatch.hidden), num_labels=num_labels)
            self._run(_shape(microbatch), microbatch, self._numbers, is_first=index == 0)
        self._sums.finish()
        # The next step sets the fixed tensor to zero, perhaps before the host has read this total.
        return self._numbers.total.clone()

    def _run(self, shape: Hashable, microbatch: Microbatch, numbers: _Numbers, is_first: bool) -> None:
        if shape in self._seen and (table := self._dropout_table(microbatch.rows.device)) is not self._table:
            # A dropout site got a new call; captured graphs read keys of the old tensor.
            self._table = table
            self._forget()
        # A new shape runs eagerly first: kernels that compile on first use cannot be captured. Gradients of an eager
        # pass have no fixed address, so only the first microbatch of a step can begin with graphs.
        if shape not in self._seen or not (self._gradients or is_first):
            self._seen.add(shape)
            self._pass(microbatch, numbers)
            self._note_used()
            self._fill()
        else:
            self._replay((shape, is_first), microbatch, numbers)

    def _pass(self, microbatch: Microbatch, numbers: _Numbers) -> None:
        loss = self._loss_sum(microbatch) / numbers.denominator
        (loss if numbers.scale is None else loss * numbers.scale).backward()  # type: ignore[no-untyped-call]
        numbers.total.add_(loss.detach())

    def _replay(self, key: tuple[Hashable, bool], microbatch: Microbatch, numbers: _Numbers) -> None:
        ready = replace(
            microbatch.to(numbers.total.device),
            is_padded=microbatch.is_padded,
            num_labels=microbatch.num_labels,
        )
        if key not in self._graphs:
            if len({shape for shape, _ in [key, *self._graphs]}) > MOST_SHAPES:
                raise UsageError(
                    f"`cuda_graphs` is true, but microbatches have more than {MOST_SHAPES} shapes, and each has a"
                    " graph; set `data.pad_to` to a larger number, such as 64, or `cuda_graphs` to false"
                )
            # The copies stay at the addresses of the graph; later microbatches are copied into them.
            inputs = ready.map(torch.clone)
            self._graphs[key] = inputs, self._captured(inputs, numbers)
        inputs, replay = self._graphs[key]
        # Capturing runs nothing, so the first microbatch of a graph is replayed as well.
        for tensor, new in zip(inputs.tensors, ready.tensors, strict=True):
            tensor.copy_(new)
        replay()
        _, is_first = key
        if is_first:  # later graphs of the step add to the same tensors
            for parameter, gradient in self._gradients.items():
                parameter.grad = gradient

    def _captured(self, microbatch: Microbatch, numbers: _Numbers) -> Callable[[], object]:
        allocates = not self._gradients

        def function() -> None:
            if allocates:
                # Activations of the pass may lie in the memory of these gradients, which are those of the last step.
                self._gradients = {}
            self._pass(microbatch, numbers)
            if allocates:
                self._gradients = {p: _zeros(p) if p.grad is None else p.grad for p in self._used}
            self._fill()

        try:
            return self._capture(function)
        except RuntimeError as error:
            raise UsageError(
                f"`cuda_graphs` is true, but a pass of this model cannot be captured ({str(error).splitlines()[0]});"
                " set it to false"
            ) from error

    @torch.no_grad()
    def _move(self, parameter: nn.Parameter) -> None:
        """Move a gradient that a pass has just allocated to the address of the graphs."""
        gradient = self._gradients.get(parameter)
        if gradient is not None and parameter.grad is not None and parameter.grad is not gradient:
            parameter.grad = gradient.copy_(parameter.grad)

    @torch.no_grad()
    def _fill(self) -> None:
        """Fill the gradients that a pass did not write: the next graph of the step adds to them."""
        for parameter, gradient in self._gradients.items():
            if parameter.grad is None:
                parameter.grad = gradient.zero_()

    def _note_used(self) -> None:
        """Note the parameters with a gradient; graphs that know fewer of them are made again."""
        used = [parameter for parameter in self._trained if parameter.grad is not None]
        if not set(used) <= set(self._used):
            self._used = [parameter for parameter in self._trained if parameter in {*used, *self._used}]
            self._forget()

    def _forget(self) -> None:
        self._graphs.clear()
        self._gradients = {}


def _zeros(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter, dtype=getattr(parameter, "grad_dtype", None))


def _shape(microbatch: Microbatch) -> Hashable:
    """Return all that decides the operations of a pass."""
    tensors = [(tuple(tensor.shape), tensor.dtype) for tensor in microbatch.tensors]
    return (*microbatch.inputs, *tensors, microbatch.filler, microbatch.is_padded)
