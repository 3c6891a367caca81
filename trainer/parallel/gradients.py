"""Sums of gradients over ranks, where no library does it."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.base.batches import batches
from trainer.parallel.groups import Group
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.placement import (
    CONTEXT_AXIS,
    REPLICAS_AXIS,
    ROWS_AXIS,
    TENSOR_AXIS,
    ParameterPlacement,
    Placements,
)
from trainer.parallel.shards.gathering import local_part

# The size of the buckets of DDP.
_BUCKET_BYTES = 25 * 2**20
_MOST_SENDING = 2  # buckets on the way at once; each is a copy of its gradients


class OverlappedSums:
    """Sums of gradients over ranks, begun during the last backward pass of a step, one bucket after the other.

    A bucket is sent once all of its gradients have their last addend. The rest is sent at the end of the step: buckets
    of an unused parameter, or of a schedule that computes gradients of weights apart from autograd's accumulation.

    Args:
        parameters: the parameters, in the order of the forward pass. The same ones get gradients on all ranks.
        sent_in: the type in which gradients are sent; None: their own.
        run_wait: a function that runs each wait for a bucket; a clock may leave out its time.
        others: the groups of parameters with other ranks; with None, for one rank, gradients are only rounded.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        group: Group,
        sent_in: torch.dtype | None = None,
        run_wait: Callable[[Callable[[], object]], object] = lambda wait: wait(),
        others: Mapping[nn.Parameter, Group] = MappingProxyType({}),
    ) -> None:
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        # The backward pass reaches the last parameters first, so their bucket is full first.
        self._buckets = [
            bucket for _, alike in groupby(trainable[::-1], others.__contains__) for bucket in _buckets(alike, sent_in)
        ]
        self._groups = [others.get(bucket[0], group) for bucket in self._buckets]
        self._sent_in, self._run_wait = sent_in, run_wait
        self._missing = [0] * len(self._buckets)
        self._num_begun = 0
        self._sending: deque[tuple[Callable[[], object], Sequence[Tensor], Tensor]] = deque()
        for index, bucket in enumerate(self._buckets):
            for parameter in bucket:
                # The hook runs after autograd has added to `grad`, so the last of `num_passes` calls sees the whole
                # sum.
                hook = partial(self._count, index)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def begin(self, num_passes: int) -> None:
        """Begin a step of `num_passes` backward passes, the same number on all ranks."""
        self._num_begun = 0
        self._missing = [len(bucket) * num_passes for bucket in self._buckets]

    def _count(self, index: int, _: Tensor) -> None:
        self._missing[index] -= 1
        # A full bucket waits for those before it: backends pair the collectives of ranks by their order.
        while self._num_begun < len(self._buckets) and not self._missing[self._num_begun]:
            self._send()  # in the order of the list, which is the same on all ranks

    @torch.no_grad()
    def _send(self) -> None:
        bucket, group = self._buckets[self._num_begun], self._groups[self._num_begun]
        self._num_begun += 1
        gradients = [parameter.grad for parameter in bucket if parameter.grad is not None]
        # No pass used them; that is the same on all ranks, so no rank waits for this one.
        if not gradients:
            return
        while len(self._sending) >= _MOST_SENDING:
            self._end()
        # One flat copy for each bucket, because a collective for each parameter would cost its latency each time.
        flat = torch.cat([gradient.reshape(-1).to(self._sent_in or gradient.dtype) for gradient in gradients])
        # Without a group, torch would take the one of all ranks.
        work = dist.all_reduce(flat, group=group, async_op=True) if group is not None else None
        self._sending.append((work.wait if work else bool, gradients, flat))

    def _end(self) -> None:
        wait, gradients, flat = self._sending.popleft()
        self._run_wait(wait)
        _copy_parts_(gradients, flat)

    @torch.no_grad()
    def finish(self) -> None:
        """Send the buckets that are left, and wait for all."""
        while self._num_begun < len(self._buckets):
            self._send()
        while self._sending:
            self._end()


def _buckets(parameters: Iterable[nn.Parameter], sent_in: torch.dtype | None) -> Iterator[list[nn.Parameter]]:
    def dtype(parameter: nn.Parameter) -> torch.dtype:
        # Weights in bf16 may have gradients in fp32.
        return sent_in or getattr(parameter, "grad_dtype", None) or parameter.dtype

    # A bucket is one flat tensor of one type. Sorting by type would lose the order of the backward pass.
    for kind, alike in groupby(parameters, dtype):
        yield from batches(alike, torch.Tensor.numel, _BUCKET_BYTES // kind.itemsize)


@torch.no_grad()
def round_gradients_(parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
    """Round the gradients to `dtype`, in place, as if they were sent in this type; their own type stays."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.copy_(parameter.grad.to(dtype))


def groups_of_experts(
    parameters: Mapping[str, nn.Parameter], placements: Placements, mesh: ParallelMesh
) -> dict[nn.Parameter, Group]:
    """Return the parameters with gradients over fewer ranks than all data ranks, with the group of these ranks."""
    group = mesh.group(REPLICAS_AXIS)
    return {p: group for name, p in parameters.items() if REPLICAS_AXIS in placements[name].partial_over}


def partial_axis(placement: ParameterPlacement, mesh: ParallelMesh) -> str | None:
    """Return the axis over whose ranks, which process the same rows, a gradient is a partial sum; None if it is not."""
    axes = [axis for axis in (CONTEXT_AXIS, TENSOR_AXIS) if axis in placement.partial_over and mesh.size(axis) > 1]
    return ROWS_AXIS if len(axes) > 1 else next(iter(axes), None)


@torch.no_grad()
def sum_partial_gradients_(
    parameters: Iterable[tuple[nn.Parameter, ParameterPlacement]],
    mesh: ParallelMesh,
    sent_in: torch.dtype | None = None,
) -> None:
    """Sum the partial gradients over tensor and context ranks, in place, with one all-reduce for each axis.

    The gradients may be sharded over the data ranks, alike on all ranks of the axis. They are sent in the type
    `sent_in`; None: in their own.
    """
    by_axis: dict[str, list[Tensor]] = defaultdict(list)
    for parameter, placement in parameters:
        if parameter.grad is not None and (axis := partial_axis(placement, mesh)) is not None:
            by_axis[axis].append(local_part(parameter.grad))
    for axis, gradients in sorted(by_axis.items()):  # all ranks in the same order
        flat = torch.cat([gradient.reshape(-1).to(sent_in or gradient.dtype) for gradient in gradients])
        _copy_parts_(gradients, mesh.sum_(flat, axis))


def _copy_parts_(tensors: Sequence[Tensor], flat: Tensor) -> None:
    for tensor, part in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


class TiedGradients:
    """Parameters with copies on several pipeline stages; the gradient is the sum over the copies.

    The copies must start equal; equal gradients keep them equal.

    Args:
        copies: this rank's copies, by the name of the parameter in the whole model.
        groups: the ranks that hold copies, by that name; None for this rank alone.
        sent_in: the type in which gradients are sent; None: their own.
    """

    def __init__(
        self,
        copies: Mapping[str, Sequence[nn.Parameter]],
        groups: Mapping[str, Group],
        sent_in: torch.dtype | None = None,
    ) -> None:
        self._sent_in = sent_in
        self._copies = {name: list(copies[name]) for name in sorted(copies)}  # all ranks in the same order
        self._groups = dict(groups)

    @torch.no_grad()
    def sum_(self) -> None:
        """Sum the gradients of all copies, in place; they may be sharded, alike on all stages."""
        for name, copies in self._copies.items():
            for parameter in copies:
                # Every rank of the group joins the sum, also if its stage did not use its copy.
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            parts = [local_part(parameter.grad) for parameter in copies if parameter.grad is not None]
            # A copy, because `parts` are the gradients, and all of them get the sum at the end.
            total = parts[0].clone(memory_format=torch.contiguous_format)
            for part in parts[1:]:
                total += part
            if (group := self._groups[name]) is not None:
                # The copies of this rank are added in their own type; only the transport rounds.
                total = total.to(self._sent_in or total.dtype)
                dist.all_reduce(total, group=group)
            for part in parts:
                part.copy_(total)
