"""Passes of microbatches as CUDA graphs: the host launches one graph for a microbatch, and not each of its kernels.

A microbatch of a new shape runs eagerly, which compiles its kernels. The next one of this shape is captured, and later
ones replay the graph. A graph reads the memory that it was captured with, so each microbatch is copied into the tensors
of its graph. With compiled layers, two microbatches of each shape run before, because the very first one is uncompiled.

Two graphs belong to a shape. That of the first microbatch of a step writes gradients, that of later ones adds to them.
The first graph of all allocates the gradients in the memory of its activations; the other graphs use the same tensors.

With several data ranks, each backward pass is cut into a few graphs. Between those of the last microbatch, the host
begins the sums of the gradients that are complete. The sums are no part of a graph: captured collectives must be
captured on all ranks alike, and ranks see shapes at different steps. Sums outside of graphs keep their timeouts, too.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trainer.base.errors import UsageError
from trainer.engine.accumulation import Schedule
from trainer.parallel.gradients import OverlappedSums
from trainer.parallel.microbatch import Microbatch, has_padding

MOST_SHAPES = 64

_MOST_PARTS = 4
"""The most graphs of a pass with sums of gradients; the sum of the last part has no computation to hide behind."""


class Capture(Protocol):
    """A recorder of operations."""

    def __call__(self, function: Callable[[], None]) -> Callable[[], object]:
        """Record the operations of `function`, without running them, and return their replay."""

    def cut(self, between: Callable[[], object]) -> None:
        """Let each replay call `between` at this place of the function that is recorded."""

    def beside(self) -> AbstractContextManager[object]:
        """Return a context of operations that replays do not wait for, after the operations until now."""

    def join(self) -> None:
        """Let later operations wait for those of `beside`."""


class EagerReplay:
    """A `Capture` for plans, which count operations: each replay runs the function."""

    def __call__(self, function: Callable[[], None]) -> Callable[[], object]:
        return function

    def cut(self, between: Callable[[], object]) -> None:
        between()

    def beside(self) -> AbstractContextManager[object]:
        return nullcontext()

    def join(self) -> None:
        pass


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
        self._context: Any = None  # of the capture that runs
        self._calls: list[Callable[[], object]] = []  # of its replay
        self._side: torch.cuda.Stream | None = None

    def __call__(self, function: Callable[[], None]) -> Callable[[], object]:
        graph, self._calls = torch.cuda.CUDAGraph(), []
        # Threads that pin memory and copies of the next microbatch may use CUDA meanwhile.
        self._context = torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local")
        # In one thread, because the thread that begins a capture must end it, and a hook of the backward pass cuts it.
        # Torch leaves the stream of the capture current if a capture fails.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.autograd.set_multithreading_enabled(False),
            self._context,
        ):
            function()
        self._pool = graph.pool()
        return partial(_call_each, (*self._calls, self._context.cuda_graph.replay))

    def cut(self, between: Callable[[], object]) -> None:
        context = self._context
        context.cuda_graph.capture_end()
        self._calls += [context.cuda_graph.replay, between]
        pool, context.cuda_graph = context.cuda_graph.pool(), torch.cuda.CUDAGraph()
        context.cuda_graph.capture_begin(pool=pool, capture_error_mode="thread_local")

    @contextmanager
    def beside(self) -> Iterator[None]:
        # On a stream of their own: sums wait for buckets on the way, and the next graph must not wait with them.
        if self._side is None:
            self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            yield

    def join(self) -> None:
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)


def _call_each(functions: Iterable[Callable[[], object]]) -> None:
    for function in functions:
        function()


class CutSums(OverlappedSums):
    """Sums of the gradients of graphs, which call no hook: each replay sends buckets between its parts."""

    _when_full: Callable[[int], object] | None = None

    @contextmanager
    def watching(self, when_full: Callable[[int], object]) -> Iterator[None]:
        """Run one backward pass in this context.

        Args:
            when_full: is called with the number of full buckets each time that one more is full.
        """
        self.begin(1)
        self._num_full, self._when_full = 0, when_full
        try:
            yield
        finally:
            self._when_full = None

    def _count(self, index: int, _: Tensor) -> None:
        self._missing[index] -= 1
        # The same order as without graphs, in which all ranks send.
        while self._when_full and self._num_full < len(self._buckets) and not self._missing[self._num_full]:
            self._num_full += 1
            self._when_full(self._num_full)

    def cuts(self, number: int) -> set[int]:
        """Return the numbers of full buckets at which a pass is cut into at most `number` parts of equal gradients."""
        ends = [*accumulate(sum(p.numel() for p in bucket) for bucket in self._buckets)]
        return {1 + bisect_left(ends, ends[-1] * part / number) for part in range(1, number) if ends} - {len(ends)}

    def last_bucket(self, number: int) -> Sequence[nn.Parameter]:
        """Return the parameters of the last of the first `number` buckets."""
        return self._buckets[number - 1]

    def send(self, number: int) -> None:
        """Send those of the first `number` buckets that are not sent."""
        while self._num_begun < number:
            self._send()


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
        report: gets the reason if a pass cannot be captured, which then runs eagerly; a shape is captured when it has
            come three times. None: such a pass is an error, and a shape is captured when it has come twice.
        is_compiled: whether layers are compiled, from the second microbatch on.
    """

    def __init__(
        self,
        loss_sum: Callable[[Microbatch], Tensor],
        parameters: Iterable[nn.Parameter],
        dropout_table: Callable[[torch.device], Tensor | None],
        capture: Capture,
        sums: CutSums | None = None,
        report: Callable[[str], object] | None = None,
        is_compiled: bool = False,
    ) -> None:
        self._sums: CutSums = sums or CutSums((), None)
        super().__init__(self._sums)
        self._loss_sum = loss_sum
        self._is_compiled = is_compiled
        self._dropout_table = dropout_table
        self._capture = capture
        self._cuts = self._sums.cuts(_MOST_PARTS)
        self._is_last = False  # whether the pass is that of the last microbatch
        self._numbers: _Numbers | None = None
        self._table: Tensor | None = None  # that the graphs read
        self._report, self._value = report, "true" if report is None else '"auto"'
        self._seen: Counter[Hashable] = Counter()  # the eager passes of each shape
        self.longest = 0  # the most positions of a row
        self._least: float = (
            1 if report is None and not is_compiled else 2
        )  # the eager passes of a shape before its capture
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
        self._sums.begin(len(microbatches))
        for index, microbatch in enumerate(microbatches):
            # A graph cannot leave tokens out: the next microbatch of this shape has labels at other places.
            num_labels = microbatch.labels.numel()
            microbatch = replace(microbatch, is_padded=has_padding(microbatch.hidden), num_labels=num_labels)
            self.longest = max(self.longest, *(t.shape[1] for t in microbatch.tensors if t.ndim > 1), 0)
            self._is_last = index == len(microbatches) - 1
            self._run(_shape(microbatch), microbatch, self._numbers, is_first=index == 0)
        if self._cuts:
            with self._capture.beside():
                self._sums.finish()
            self._capture.join()
        else:
            self._sums.finish()
        # The next step sets the fixed tensor to zero, perhaps before the host has read this total.
        return self._numbers.total.clone()

    @property
    def num_shapes(self) -> int:
        """The number of shapes of the microbatches until now."""
        return len(self._seen)

    def _run(self, shape: Hashable, microbatch: Microbatch, numbers: _Numbers, is_first: bool) -> None:
        if self._seen[shape] and (table := self._dropout_table(microbatch.rows.device)) is not self._table:
            # A dropout site got a new call; captured graphs read keys of the old tensor.
            self._table = table
            self._forget()
        # A new shape runs eagerly first: kernels that compile on first use cannot be captured. Gradients of an eager
        # pass have no fixed address, so only the first microbatch of a step can begin with graphs.
        key = shape, is_first
        is_ready = (key in self._graphs or self._seen[shape] >= self._least) and (self._gradients or is_first)
        if not (is_ready and self._replay(key, microbatch, numbers)):
            self._seen[shape] += 1
            self._pass(microbatch, numbers)
            self._note_used()
            self._fill()

    def _pass(self, microbatch: Microbatch, numbers: _Numbers) -> None:
        loss = self._loss_sum(microbatch) / numbers.denominator
        (loss if numbers.scale is None else loss * numbers.scale).backward()  # type: ignore[no-untyped-call]
        numbers.total.add_(loss.detach())

    def _replay(self, key: tuple[Hashable, bool], microbatch: Microbatch, numbers: _Numbers) -> bool:
        """Run the pass by its graph, and return whether it has one."""
        ready = replace(
            microbatch.to(numbers.total.device), is_padded=microbatch.is_padded, num_labels=microbatch.num_labels
        )
        if key not in self._graphs:
            try:
                self._require_room(key)
                # The copies stay at the addresses of the graph; later microbatches are copied into them.
                inputs = ready.map(torch.clone)
                self._graphs[key] = inputs, self._captured(inputs, numbers)
            except UsageError as error:
                if self._report is None:
                    raise
                self._give_up(str(error), key)
                return False
        inputs, replay = self._graphs[key]
        # Capturing runs nothing, so the first microbatch of a graph is replayed as well.
        for tensor, new in zip(inputs.tensors, ready.tensors, strict=True):
            tensor.copy_(new)
        _, is_first = key
        if is_first:  # sums read them during the replay, and later graphs of the step add to the same tensors
            for parameter, gradient in self._gradients.items():
                parameter.grad = gradient
        replay()
        return True

    def _require_room(self, key: tuple[Hashable, bool]) -> None:
        if len({shape for shape, _ in [key, *self._graphs]}) > MOST_SHAPES:
            raise UsageError(
                f"`cuda_graphs` is {self._value}, but microbatches have more than {MOST_SHAPES} shapes, and each has a"
                " graph; set `data.pad_to` to a larger number, such as 64, or `cuda_graphs` to false"
            )

    def _give_up(self, reason: str, key: tuple[Hashable, bool]) -> None:
        """Capture no further shapes; those with graphs keep them."""
        assert self._report is not None
        self._report(reason)
        self._least = math.inf
        _, is_first = key
        if is_first:  # the capture has set gradients that no graph writes
            for parameter in self._trained:
                parameter.grad = None

    def _captured(self, microbatch: Microbatch, numbers: _Numbers) -> Callable[[], object]:
        allocates = not self._gradients

        def function() -> None:
            if allocates:
                # Activations of the pass may lie in the memory of these gradients, which are those of the last step.
                self._gradients = {}
            with self._sums.watching(self._cut):
                self._pass(microbatch, numbers)
            if allocates:
                self._gradients = {p: _zeros(p) if p.grad is None else p.grad for p in self._used}
            self._fill()

        try:
            # A compilation runs kernels to choose their blocks, which a graph would hold.
            with torch.compiler.set_stance("fail_on_recompile") if self._is_compiled else nullcontext():
                return self._capture(function)
        except RuntimeError as error:
            why, named = str(error).splitlines()[0], f"`cuda_graphs` is {self._value}"
            if "fail_on_recompile" in why:
                raise UsageError(
                    f"{named} and `compile` is true, but a layer would be compiled again in a captured pass"
                    f" ({str(error).splitlines()[-1].strip()}); set one of them to false"
                ) from error
            raise UsageError(
                f"{named}, but a pass of this model cannot be captured ({why}); set it to false"
            ) from error

    def _cut(self, number: int) -> None:
        """Cut the pass that is captured after the gradients of so many buckets, if their sum is worth a graph."""
        if number in self._cuts:
            for parameter in self._sums.last_bucket(number):  # the hook of the last one may be still to come
                self._move(parameter)
            self._capture.cut(partial(self._send, number))

    def _send(self, number: int) -> None:
        if self._is_last:
            with self._capture.beside():
                self._sums.send(number)

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
