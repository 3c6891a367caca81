"""The ranks of one node; the first reads files for all."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from trainer.base.processes import this_machine
from trainer.parallel.mesh import ParallelMesh
from trainer.ranks.messages import decode, encode

Result = TypeVar("Result")


class NodeRanks:
    """The ranks of this rank's node; all of them must make the same calls.

    Args:
        group: their process group, which sends CPU tensors.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._reader = dist.get_global_rank(group, 0)
        self.is_reader = dist.get_rank(group) == 0
        """Whether this rank reads for the others."""

    def read(self, action: Callable[[], Any]) -> Any:
        """Run `action` on the reader alone, and return its result on all ranks.

        Args:
            action: its result has the types that `trainer.ranks.messages.encode` takes.

        Raises:
            OSError, SafetensorError: the file cannot be read; on every rank.
        """
        result, error = _attempt(action) if self.is_reader else (None, None)
        sent = encode([result, str(error) if error else None]) if self.is_reader else b""
        size = torch.tensor([len(sent)])
        self._broadcast(size)
        # On the other ranks, `bytearray(n)` is n zero bytes, which the broadcast fills.
        message = torch.frombuffer(bytearray(sent or int(size)), dtype=torch.uint8)
        self._broadcast(message)
        result, text = decode(message.numpy().tobytes())
        # A reader that raised before the broadcasts would leave its peers waiting.
        self._raise(error, text)
        return result

    def read_tensor(self, action: Callable[[], Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Run `action` on the reader alone, and return its tensor, of a known shape and type, on the CPU of all ranks.

        Raises:
            OSError, SafetensorError: the file cannot be read; on every rank.
        """
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        sent = torch.zeros(num_bytes + 1, dtype=torch.uint8)  # the last byte is the number of errors
        error = None
        if self.is_reader:
            tensor, error = _attempt(action)
            if tensor is None:
                sent[-1] = 1
            else:
                sent[:-1] = tensor.contiguous().flatten().view(torch.uint8)
                del tensor
        self._broadcast(sent)
        self._raise(error, "its error names the file that cannot be read" if sent[-1] else None)
        return sent[:-1].view(dtype).reshape(shape)

    def any_of(self, values: Sequence[bool]) -> list[bool]:
        """Return for each place of a list whether a rank of the node has True there."""
        flags = torch.tensor(values, dtype=torch.uint8)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group)
        return [bool(value) for value in flags.tolist()]

    def _broadcast(self, tensor: Tensor) -> None:
        dist.broadcast(tensor, src=self._reader, group=self._group)

    def _raise(self, error: Exception | None, text: str | None) -> None:
        if error is not None:
            raise error
        if text is not None:
            raise OSError(f"rank {self._reader}, which reads for this node: {text}")


def _attempt(action: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    try:
        return action(), None
    except (OSError, SafetensorError) as error:
        return None, error


@contextmanager
def ranks_of_node(mesh: ParallelMesh) -> Iterator[NodeRanks | None]:
    """Yield the ranks of this rank's node; None if there is one rank in all. All ranks of the mesh must call it."""
    if mesh.world_size == 1:
        yield None
        return
    nodes: list[str] = mesh.all_gather(node_name())
    members: Any = None
    for node in dict.fromkeys(nodes):
        ranks = [rank for rank, name in enumerate(nodes) if name == node]
        # All ranks must create each group. Its tensors are on the CPU.
        group = dist.new_group(ranks, backend="gloo")
        members = group if mesh.rank in ranks else members
    try:
        yield NodeRanks(members)
    finally:
        dist.destroy_process_group(members)


def node_name() -> str:
    """Return a name that the processes of one machine share, and no others."""
    return f"{socket.gethostname()} {this_machine()}"  # machines may have one name
