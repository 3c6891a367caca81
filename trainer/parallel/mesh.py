"""The mesh of ranks, which owns every process group; it is passed as an argument, never a global."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from math import prod
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer.base.errors import TrainerError, error_of_values, error_to_values
from trainer.parallel.device_traits import DeviceTraits, traits_of
from trainer.parallel.placement import CONTEXT_AXIS, EXPERT_AXIS, REPLICAS_AXIS, ROWS_AXIS, SHARDS_AXIS, TENSOR_AXIS
from trainer.ranks.messages import decode, encode

Result = TypeVar("Result")

# Outermost first: tensor ranks are neighbours, on the fastest links. Megatron-LM and torchtitan have the same order.
AXES = ("pp", "dp_replicate", "dp_shard", EXPERT_AXIS, CONTEXT_AXIS, TENSOR_AXIS)
DATA_AXES = ("dp_replicate", "dp_shard", EXPERT_AXIS)
JOINT_AXES = {
    "dp": DATA_AXES, REPLICAS_AXIS: DATA_AXES[:2], SHARDS_AXIS: DATA_AXES[1:], ROWS_AXIS: (CONTEXT_AXIS, TENSOR_AXIS)
}  # fmt: skip
"""The axes that stand for several neighbouring ones."""


class ParallelMesh:
    """The mesh of ranks, its axes and their process groups.

    Axis names are those of `AXES` and `JOINT_AXES`. An axis of size 1 has no group, and its collectives are the
    identity, so one process needs no process group.

    Args:
        degrees: the size of each axis, 1 by default. Their product must be the world size.
    """

    def __init__(self, device: torch.device, **degrees: int) -> None:
        assert set(degrees) <= set(AXES), f"unknown axes {set(degrees) - set(AXES)}"
        self.device = device
        self._degrees = {axis: degrees.get(axis, 1) for axis in AXES}
        joint = {axis: prod(self._degrees[part] for part in parts) for axis, parts in JOINT_AXES.items()}
        self.sizes = self._degrees | joint
        self.world_size = prod(self._degrees.values())
        assert self.world_size == 1 or dist.is_initialized(), "several ranks need a process group"
        self.rank = 0
        self.device_mesh: DeviceMesh | None = None
        # Computed once: each slice of torch's mesh takes a millisecond.
        self._indices = dict.fromkeys(self.sizes, 0)
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._lines: dict[str, DeviceMesh] = {}
        self._replicated: dict[str, DeviceMesh] = {}
        self._control: dist.ProcessGroup | None = None
        if dist.is_initialized():
            assert dist.get_world_size() == self.world_size, "the degrees must multiply to the world size"
            self.rank = dist.get_rank()
            # A collective of all ranks: torch creates the groups of all axes here.
            self.device_mesh = init_device_mesh(device.type, tuple(self._degrees.values()), mesh_dim_names=AXES)
            for axis in self._indices:
                line = self._lines.get(plain := self.plain_axis(axis))
                if line is None:
                    parts = JOINT_AXES.get(plain)
                    line = self.device_mesh[parts]._flatten(plain) if parts else self.device_mesh[plain]
                self._lines[axis] = line
                self._indices[axis], self._groups[axis] = line.get_local_rank(), line.get_group()
            if self.size("dp_replicate") > 1 and self.plain_axis(SHARDS_AXIS) == SHARDS_AXIS:
                self._replicated[SHARDS_AXIS] = self._replicated_line(SHARDS_AXIS)  # here, because a plan has no values
            # Decisions (stop, save) and gathered metrics are CPU tensors, which gloo sends without the device's queue.
            self._control = dist.group.WORLD

    @property
    def traits(self) -> DeviceTraits:
        return traits_of(self.device)

    def size(self, axis: str) -> int:
        return self.sizes[axis]

    def index(self, axis: str) -> int:
        return self._indices[axis]

    def plain_axis(self, axis: str) -> str:
        """Return the axis with the ranks of `axis`: one with the ranks of a part, or of `dp`, is that."""
        if axis not in JOINT_AXES or axis == "dp":
            return axis
        several = [part for part in JOINT_AXES[axis] if self._degrees[part] > 1]
        if len(several) < 2:
            return next(iter(several), JOINT_AXES[axis][0])
        return "dp" if several == [part for part in DATA_AXES if self._degrees[part] > 1] else axis

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """Return the process group along `axis`, or None if the axis has one rank."""
        return None if self.device_mesh is None or self.size(axis) == 1 else self.process_group(axis)

    def process_group(self, axis: str) -> dist.ProcessGroup:
        """Return the process group along `axis`, also for one rank, for libraries that require a group."""
        assert self._groups, "one process has no process group"
        return self._groups[axis]

    def sharding(self, axis: str) -> DeviceMesh:
        """Return the mesh of FSDP with shards along `axis`; with two axes, FSDP replicates over the first one: HSDP."""
        assert self.device_mesh is not None, "one process has no ranks to share with"
        axes = ("dp_replicate", self.plain_axis(axis))
        if self.size(axes[0]) == 1:
            return self._lines[axis]
        return self.device_mesh[axes] if axes[1] in AXES else self._replicated[axes[1]]

    def _replicated_line(self, axis: str) -> DeviceMesh:
        groups = [self._groups["dp_replicate"], self._groups[axis]]
        rows, columns = (dist.get_process_group_ranks(group) for group in groups)
        # Through this rank, which is in a row and in a column.
        ranks = [[first + second - self.rank for second in columns] for first in rows]
        return DeviceMesh.from_group(groups, self.device.type, ranks, mesh_dim_names=("dp_replicate", axis))

    @property
    def is_first_replica(self) -> bool:
        """Whether this rank is the first of those with the same pipeline stages; it keeps gathered tensors."""
        return self.index("dp") == 0 and self.index(ROWS_AXIS) == 0

    def subgroup(self, axis: str, indices: Sequence[int]) -> dist.ProcessGroup | None:
        """Create a process group of the ranks at `indices` along `axis` and return it; None on other ranks.

        All ranks must call it, with the same arguments.
        """
        assert self.device_mesh is not None
        mesh = np.arange(self.world_size).reshape(list(self._degrees.values()))  # a plan has no values of tensors
        lines = np.moveaxis(mesh, AXES.index(axis), -1).reshape(-1, self.size(axis))
        mine = None
        for line in lines.tolist():
            ranks = [line[index] for index in indices]
            group = dist.new_group(ranks)  # all ranks must create each group, also those that they are not in
            if self.rank in ranks:
                mine = group
        return mine

    def new_group(self) -> dist.ProcessGroup:
        """Create a further group of all ranks for CPU tensors, which a thread may use beside the training.

        All ranks must call it.
        """
        group: dist.ProcessGroup = dist.new_group(backend="gloo")
        return group

    def send(self, tensor: Tensor | None, source: int, target: int, like: Tensor) -> Tensor | None:
        """Return the tensor of rank `source` on rank `target`, on its CPU if that is another rank; None elsewhere.

        All ranks must call it.

        Args:
            tensor: the tensor, on `source`.
            like: a tensor of the same shape and type, perhaps on `meta`.
        """
        if source == target or self.rank not in (source, target):
            return tensor if self.rank == target else None
        if self.rank == source:
            assert tensor is not None
            dist.send(tensor.cpu().contiguous(), dst=target, group=self._control)
            return None
        received = torch.empty_like(like, device="cpu")
        dist.recv(received, src=source, group=self._control)
        return received

    def sum_(self, tensor: Tensor, axis: str) -> Tensor:
        return self.begin_sum_(tensor, axis)()

    def max_(self, tensor: Tensor, axis: str) -> Tensor:
        """Replace each element of `tensor` by the largest on the ranks along `axis`, in place."""
        if self.size(axis) == 1:
            return tensor
        return _begin_all_reduce(tensor, dist.ReduceOp.MAX, self.group(axis))()

    def begin_sum_(self, tensor: Tensor, axis: str) -> Callable[[], Tensor]:
        """Begin to sum `tensor` over `axis`, in place, and return a function that waits for the sum."""
        if self.size(axis) == 1:
            return lambda: tensor
        return _begin_all_reduce(tensor, dist.ReduceOp.SUM, self.group(axis))

    def agree_max(self, value: int) -> int:
        """Return the largest `value` of all ranks, on all ranks, for a common decision."""
        return self.begin_agree_max(value)()

    def begin_agree_max(self, value: int) -> Callable[[], int]:
        """Begin `agree_max` and return a function that waits for the answer; ranks can work in between."""
        if self.world_size == 1:
            return lambda: value
        agreed = _begin_all_reduce(torch.tensor(value, dtype=torch.int64), dist.ReduceOp.MAX, self._control)
        return lambda: int(agreed())

    def agree_any(self, *values: bool) -> tuple[bool, ...]:
        """Return whether each value is true on any rank, on all ranks."""
        # The maximum of zeros and ones is a logical or.
        agreed = torch.tensor(values, dtype=torch.int64)
        if self.world_size > 1:
            _begin_all_reduce(agreed, dist.ReduceOp.MAX, self._control)()
        return tuple(bool(value) for value in agreed)

    def agree_each(self, value: int) -> tuple[int, ...]:
        """Return the `value` of every rank, in order of rank, on all ranks."""
        return tuple(int(largest) for (largest,) in self.agree_table([value]))

    def agree_table(self, values: Sequence[float]) -> list[list[float]]:
        """Return the `values` of every rank, in order of rank, on all ranks; each has the same number of them.

        Integers are exact up to 2**53.
        """
        table = torch.zeros((self.world_size, len(values)), dtype=torch.float64)
        # Each rank fills its row, and the others add zeros to it, so the sum is the gathered table to the last bit.
        table[self.rank] = torch.tensor(values, dtype=torch.float64)
        if self.world_size > 1:
            dist.all_reduce(table, group=self._control)
        rows: list[list[float]] = table.tolist()
        return rows

    def gather(self, value: Any) -> list[Any] | None:
        """Return the `value` of every rank, in order of rank, on rank 0; None on the others.

        Each other rank sends two messages, its size and its value; rank 0 holds the values and one message.

        Args:
            value: a value of the types that `trainer.ranks.messages.encode` takes.
        """
        if self.world_size == 1:
            return [value]
        message = _as_tensor(encode(value))
        size = torch.tensor([len(message)])
        sizes = [torch.empty_like(size) for _ in range(self.world_size)] if self.rank == 0 else None
        # The sizes come first, because rank 0 allocates the memory of each message.
        dist.gather(size, sizes, group=self._control)
        if sizes is None:
            dist.send(message, dst=0, group=self._control)  # gloo's gather would pad all to the longest
            return None
        values = [value]
        for rank in range(1, self.world_size):
            received = torch.empty(int(sizes[rank]), dtype=torch.uint8)
            dist.recv(received, src=rank, group=self._control)
            values.append(_decoded(received))
        return values

    def all_gather(self, value: Any) -> list[Any]:
        """Return the `value` of every rank, of the types that `gather` takes, in order of rank, on all ranks."""
        values: list[Any] = self.share(self.gather(value))
        return values

    def gather_distinct(self, value: Any) -> list[Any] | None:
        """Return the different values of all ranks on rank 0; None on the others.

        A value that many ranks have is sent once, so the memory of rank 0 does not grow with their number.

        Args:
            value: a value of the types that `gather` takes.
        """
        digests = self.gather(hashlib.sha256(encode(value)).hexdigest())
        # Of equal values, that of the lowest rank is sent: it comes last in the reversed list and replaces the others.
        chosen: list[int] = self.share(
            list({digest: rank for rank, digest in reversed([*enumerate(digests or [])])}.values())
        )
        gathered = self.gather(value if self.rank in chosen else None)
        return gathered and [gathered[rank] for rank in sorted(chosen)]

    def share(self, value: Any) -> Any:
        """Return rank 0's `value`, of the types that `gather` takes, on every rank."""
        if self.world_size == 1:
            return value
        message = _as_tensor(encode(value) if self.rank == 0 else b"")
        size = torch.tensor([len(message)])
        dist.broadcast(size, src=0, group=self._control)
        message = message if self.rank == 0 else torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(message, src=0, group=self._control)
        return value if self.rank == 0 else _decoded(message)

    def on_rank_zero(self, action: Callable[[], Result]) -> Result:
        """Run `action` on rank 0 alone and return its result on every rank.

        If it fails, all ranks leave together; none waits for a rank that has left.

        Raises:
            TrainerError: the error of `action`, on every rank.
        """
        result: Result | None = None
        error: TrainerError | None = None
        if self.rank == 0:
            try:
                result = action()
            except TrainerError as raised:
                error = raised
        # One message has the result and the error. With two, other ranks could wait for one that rank 0 never sends.
        result, values = self.share((result, error_to_values(error) if error else None))
        if values is not None:
            # Rank 0 raises the original error, with its traceback; the others make it again from its values.
            raise error or error_of_values(values)
        return cast(Result, result)

    def on_every_rank(self, action: Callable[[], object]) -> None:
        """Run `action` on every rank. If it fails on one, all ranks leave together.

        Raises:
            TrainerError: the error of the first rank that failed, on every rank.
        """
        error: TrainerError | None = None
        try:
            action()
        except TrainerError as raised:
            error = raised
        # Every rank answers, also without an error, so none waits for one that has left.
        errors = self.all_gather(error_to_values(error) if error else None)
        if failed := next((values for values in errors if values is not None), None):
            raise error or error_of_values(failed)

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier(group=self._control)


def _as_tensor(message: bytes) -> Tensor:
    # Torch warns of memory that cannot be written, such as `bytes`, and refuses an empty buffer.
    return torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else torch.empty(0, dtype=torch.uint8)


def _decoded(message: Tensor) -> Any:
    return decode(message.numpy().tobytes())


def _begin_all_reduce(
    tensor: Tensor, operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None
) -> Callable[[], Tensor]:
    work = dist.all_reduce(tensor, operation, group, async_op=True)
    assert work is not None

    def wait() -> Tensor:
        work.wait()
        return tensor

    return wait


def backend(device: torch.device) -> str:
    """Return the backend of collectives for devices of this type, with gloo for CPU tensors."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


@contextmanager
def collectives_within(timeout: timedelta) -> Iterator[None]:
    """Give all groups that are made in this context the limit `timeout` for each collective, also those of libraries.

    A new group does not take the limit of the group of all ranks, but torch's default of 10 or 30 minutes.
    """
    defaults: Any = dist.distributed_c10d
    # Torch reads these variables of its module when a group is made; groups of NCCL have one of their own.
    before = defaults.default_pg_timeout, defaults.default_pg_nccl_timeout
    defaults.default_pg_timeout = defaults.default_pg_nccl_timeout = timeout
    try:
        yield
    finally:
        defaults.default_pg_timeout, defaults.default_pg_nccl_timeout = before


def init_process_group(device: torch.device, rank: int, world_size: int, store: Store, timeout: timedelta) -> None:
    """Create the process group of all ranks.

    Args:
        store: the store of all ranks; a single rank needs no port.
        timeout: the limit for the creation and for each collective.
    """
    store.set_timeout(timeout)
    dist.init_process_group(
        backend(device),
        # The rendezvous has put keys into the same store, so those of the group have a prefix.
        store=PrefixStore("group", store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        # With a device, NCCL connects here and not in the first collective.
        device_id=device if device.type == "cuda" else None,
    )
