"""The binding of local ranks to the cores of their GPU's NUMA node, by torch's code.

Memory that a rank writes lies on the node of its core; a copy from there to the GPU crosses no link between sockets.
Ranks of another launcher are not bound: torchrun has `--numa-binding`, and srun `--cpu-bind`.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.base.internals import Internals
from trainer.base.terminal import say
from trainer.base.text import listed
from trainer.features.numa.section import binds
from trainer.ranks.environment import LaunchEnvironment, threads_per_rank

if TYPE_CHECKING:
    from trainer.recipe.reading.loading import ResolvedRecipe

INTERNALS = Internals(
    "torch",
    "2.13",
    {
        "torch.numa.binding": [
            "_get_set_of_int_from_ranges_str",
            "_get_allowed_logical_cpu_indices_for_numa_node",  # those that the affinity of this process leaves
            "_bind_all_threads_in_current_process_to_logical_cpus",
        ]
    },
)
# Torch's public option also needs the program `numactl`, which containers lack, and takes an unknown node for node 0.

_SYS = Path("/sys")


class _UnboundError(Exception):
    """The reason why no rank is bound."""


@dataclass(frozen=True)
class NodeCores:
    """The cores of a NUMA node that this process may use, and the number of local ranks with GPUs on the node."""

    node: int
    cores: frozenset[int]
    num_ranks: int


@contextmanager
def bound_rank(resolved: ResolvedRecipe, environment: LaunchEnvironment) -> Iterator[None]:
    """Run a rank that `trainer run` has started on the cores of its GPU's node in this context, and say so."""
    import torch

    num_ranks = environment.local_world_size
    if not binds(resolved.recipe.parallel) or num_ranks < 2 or torch.cuda.device_count() < num_ranks:
        yield
        return
    try:
        nodes = nodes_of_ranks(num_ranks)
    except _UnboundError as reason:
        _say(environment, f"ranks run on all cores: {reason}; `parallel.numa` off hides this line")
    else:
        try:
            if nodes:
                _bind(nodes[environment.local_rank], environment)
                _say(environment, f"ranks run on the cores of their GPU's NUMA node: {_summary(nodes)}")
        except OSError as error:  # a container may forbid it, also for some ranks only
            who = f"rank {environment.rank} runs on all cores"
            say(f"{who}: the system refuses to bind it ({error}); `parallel.numa` off hides this line", err=True)
    yield


def nodes_of_ranks(num_ranks: int) -> list[NodeCores]:
    """Return the node of the GPU of each local rank; empty if a binding changes nothing.

    Raises:
        _UnboundError: the node of a GPU is unknown, or has fewer cores for this process than ranks.
    """
    if sys.platform != "linux":
        return []
    online = _read(_SYS / "devices/system/node/online")
    if lacking := INTERNALS.lacking():
        raise _UnboundError(f"this version of torch has no {', '.join(lacking)}")
    from torch.numa import binding

    try:
        numbered = binding._get_set_of_int_from_ranges_str(online)
    except ValueError as error:
        raise _UnboundError(f"the system gives {online!r} as its NUMA nodes") from error
    allowed = {node: _allowed(node) for node in numbered}
    if sum(map(bool, allowed.values())) < 2:
        return []  # one node, or a cpuset within one
    nodes = [_node_of(index) for index in range(num_ranks)]
    numbers = Counter(nodes)
    for node, number in sorted(numbers.items()):
        cores = allowed.get(node, frozenset())
        if len(cores) < number:
            raise _UnboundError(
                f"{number} GPUs are on NUMA node {node}, where this process may use {len(cores)} cores; allow more of"
                " them"
            )
    return [NodeCores(node, allowed[node], numbers[node]) for node in nodes]


def _allowed(node: int) -> frozenset[int]:
    from torch.numa import binding

    try:
        return frozenset(binding._get_allowed_logical_cpu_indices_for_numa_node(numa_node_index=node))
    except (OSError, RuntimeError, ValueError) as error:
        raise _UnboundError(f"the cores of NUMA node {node} are unknown ({error})") from error


def _node_of(index: int) -> int:
    """Return the NUMA node of a GPU."""
    import torch

    gpu: Any = torch.cuda.get_device_properties(index)
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    text = _read(_SYS / "bus/pci/devices" / address / "numa_node")
    if not text.isdecimal():  # -1: the firmware, or a virtual machine, names none
        raise _UnboundError(f"the system does not know the NUMA node of GPU {index}, and gives {text or 'nothing'}")
    return int(text)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise _UnboundError(f"{file} cannot be read ({type(error).__name__})") from error


def _bind(place: NodeCores, environment: LaunchEnvironment) -> None:
    """Bind all threads of this process, with no more compute threads than its share of the cores."""
    import torch
    from torch.numa import binding

    threads = threads_per_rank(environment)  # of all cores, so before the binding
    binding._bind_all_threads_in_current_process_to_logical_cpus(logical_cpu_indices=set(place.cores))
    if threads is not None:
        torch.set_num_threads(min(threads, len(place.cores) // place.num_ranks))


def _summary(nodes: Sequence[NodeCores]) -> str:
    parts = []
    for place in sorted(set(nodes), key=lambda place: place.node):
        ranks = [str(rank) for rank, other in enumerate(nodes) if other == place]
        parts.append(f"{len(place.cores)} cores of node {place.node} for ranks {listed(ranks, 16)}")
    return "; ".join(parts)


def _say(environment: LaunchEnvironment, line: str) -> None:
    if environment.local_rank == 0:
        say(line, err=True)
