"""Local ranks run on the cores beside their GPU: fake trees of /sys, and the affinity of real processes."""

from __future__ import annotations

import builtins
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.training import tiny_recipe
from trainer.base.internals import Internals
from trainer.features.numa import binding
from trainer.ranks.environment import LaunchEnvironment

torchs = pytest.importorskip("torch.numa.binding")

TWO = {0: "0-3,8-11", 1: "4-7,12-15"}  # two sockets with 4 cores of two threads each


class Machine:
    """A fake machine: its nodes in a tree of /sys, its GPUs, and the affinity of this process."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self.allowed = set(range(16))
        self.bound: set[int] | None = None
        self.threads: int | None = None
        self.said: list[str] = []
        self._gpus: list[SimpleNamespace] = []
        patch.setattr(binding, "_SYS", folder)
        patch.setattr(torchs, "open", self._open, raising=False)
        patch.setattr(torchs, "_get_allowed_cpu_indices_for_current_thread", lambda: self.allowed)
        patch.setattr(torchs, "_bind_all_threads_in_current_process_to_logical_cpus", self._bind)
        patch.setattr(torch.cuda, "device_count", lambda: len(self._gpus))
        patch.setattr(torch.cuda, "get_device_properties", lambda index: self._gpus[index])
        patch.setattr(torch, "set_num_threads", lambda number: setattr(self, "threads", number))
        patch.setattr(os, "sched_getaffinity", lambda _: self.allowed)
        patch.setattr(binding, "say", lambda line, err: self.said.append(line))
        patch.delenv("OMP_NUM_THREADS", raising=False)

    def _open(self, file: str) -> Any:
        return builtins.open(self._folder / Path(file).relative_to("/sys"))

    def _bind(self, logical_cpu_indices: set[int]) -> None:
        self.bound = self.allowed = logical_cpu_indices

    def write(self, file: str, text: str) -> None:
        path = self._folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    def build(self, cores: Mapping[int, str], gpus: list[int | str | None]) -> None:
        """Write nodes with their cores, and GPUs with their node; None: without a file."""
        self.write("devices/system/node/online", f"0-{len(cores) - 1}" if len(cores) > 1 else "0")
        for node, text in cores.items():
            self.write(f"devices/system/node/node{node}/cpulist", text)
        for index, node in enumerate(gpus):
            self._gpus.append(SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1A + index, pci_device_id=0))
            if node is not None:
                self.write(f"bus/pci/devices/0000:{0x1A + index:02x}:00.0/numa_node", str(node))

    def run(self, rank: int, number: int, how: str = "auto") -> None:
        resolved: Any = SimpleNamespace(recipe=tiny_recipe(parallel={"numa": how}))
        environment = LaunchEnvironment("trainer", rank, rank, number, number)
        with binding.bound_rank(resolved, environment):
            pass


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


@pytest.mark.parametrize(("rank", "cores"), [(0, {0, 1, 2, 3, 8, 9, 10, 11}), (2, {4, 5, 6, 7, 12, 13, 14, 15})])
def test_a_rank_runs_beside_its_gpu(machine: Machine, rank: int, cores: set[int]):
    machine.build(TWO, [0, 0, 1, 1])
    machine.run(rank, 4)
    assert machine.bound == cores
    assert machine.threads == 4  # as without the binding: 16 cores for 4 ranks
    summary = "8 cores of node 0 for ranks 0, 1; 8 cores of node 1 for ranks 2, 3"
    assert machine.said == ([f"ranks run on the cores of their GPU's NUMA node: {summary}"] if rank == 0 else [])


def test_ranks_whose_gpus_share_a_node_share_its_cores(machine: Machine):
    machine.build(TWO, [1, 1, 1])
    machine.run(0, 3)
    assert machine.bound == {4, 5, 6, 7, 12, 13, 14, 15}
    assert machine.threads == 2  # of all cores, they would have 5 each, and so 15 threads on 8 cores


def test_a_cpuset_is_respected(machine: Machine):
    machine.build(TWO, [0, 1])
    machine.allowed = {2, 3, 12}
    machine.run(0, 2)
    assert (machine.bound, machine.threads) == ({2, 3}, 1)


def test_the_users_number_of_threads_stays(machine: Machine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    machine.build(TWO, [0, 1])
    machine.run(1, 2)
    assert (machine.bound, machine.threads) == ({4, 5, 6, 7, 12, 13, 14, 15}, None)


@pytest.mark.parametrize(
    ("cores", "gpus", "allowed", "how"),
    [
        (TWO, [0, 1], range(16), "off"),
        ({0: "0-15"}, [0, 0], range(16), "auto"),  # one node
        (TWO, [0, 1], (4, 5), "auto"),  # a cpuset within one node
        (TWO, [0], range(16), "auto"),  # ranks without GPUs
        (TWO, [], range(16), "auto"),
    ],
)
def test_a_binding_that_changes_nothing_is_left_out(machine: Machine, cores, gpus, allowed, how):
    machine.build(cores, gpus)
    machine.allowed = set(allowed)
    machine.run(0, 2, how)
    assert machine.bound is None
    assert machine.said == []


@pytest.mark.parametrize(
    ("cores", "gpus", "allowed", "reason"),
    [
        (TWO, [0, -1], range(16), "the system does not know the NUMA node of GPU 1, and gives -1"),
        (TWO, [0, None], range(16), "1b:00.0/numa_node cannot be read (FileNotFoundError)"),
        ({}, [0, 0], range(16), "cores of NUMA node 0 are unknown"),
        (TWO, [0, 0, 1], (0, 4, 5), "2 GPUs are on NUMA node 0, where this process may use 1 cores"),
        (TWO, [0, 7], range(16), "1 GPUs are on NUMA node 7, where this process may use 0 cores"),
    ],
)
def test_an_unknown_or_crowded_node_leaves_all_ranks_unbound(machine: Machine, cores, gpus, allowed, reason):
    machine.build(cores, gpus)
    machine.allowed = set(allowed)
    for rank in range(len(gpus)):
        machine.run(rank, len(gpus))
    assert (machine.bound, machine.threads) == (None, None)
    (line,) = machine.said  # of rank 0 alone
    assert reason in line
    assert line.startswith("ranks run on all cores: ")
    assert line.endswith("; `parallel.numa` off hides this line")


def test_a_machine_without_nodes_in_its_tree(machine: Machine):
    machine.build(TWO, [0, 1])
    (machine._folder / "devices/system/node/online").unlink()
    machine.run(0, 2)
    assert "node/online cannot be read" in machine.said[0]


def test_torch_without_its_functions(machine: Machine, monkeypatch: pytest.MonkeyPatch):
    machine.build(TWO, [0, 1])
    monkeypatch.setattr(binding, "INTERNALS", Internals("torch", "1.0", {"torch.numa.binding": ["_bind"]}))
    machine.run(0, 2)
    assert "this version of torch has no torch.numa.binding._bind; " in machine.said[0]


def bound_threads() -> tuple[list[set[int]], set[int]]:
    """Bind this process to one of its cores; return the affinities of its threads, and of a thread that comes later."""
    end = threading.Event()
    before = threading.Thread(target=end.wait)
    before.start()
    core = min(os.sched_getaffinity(0))
    place = binding.NodeCores(0, frozenset({core}), 1)
    binding._bind(place, LaunchEnvironment("trainer", world_size=2, local_world_size=2))
    found = [os.sched_getaffinity(thread) for thread in (0, before.native_id)]
    later: list[set[int]] = []
    after = threading.Thread(target=lambda: later.append(os.sched_getaffinity(0)))
    after.start()
    after.join()
    end.set()
    before.join()
    return [*found, *later], {core}


def test_all_threads_of_a_process_are_bound(ranks):
    pool = ranks(1)
    try:
        ((found, core),) = pool.run(bound_threads)
    finally:
        pool.close()  # other tests need all cores
    assert found == [core] * 3


@pytest.mark.parametrize("text", ["possible", "0-", "0-1-2"])
def test_a_list_of_nodes_that_cannot_be_read_leaves_all_ranks_unbound(machine: Machine, text: str):
    machine.build(TWO, [0, 1])
    machine.write("devices/system/node/online", text)
    machine.run(0, 2)
    assert machine.bound is None
    assert machine.said == [
        f"ranks run on all cores: the system gives {text!r} as its NUMA nodes; `parallel.numa` off hides this line"
    ]


def test_a_container_that_forbids_a_binding_is_named_by_each_rank(machine: Machine, monkeypatch: pytest.MonkeyPatch):
    def refused(logical_cpu_indices: set[int]) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(torchs, "_bind_all_threads_in_current_process_to_logical_cpus", refused)
    machine.build(TWO, [0, 1])
    for rank in range(2):
        machine.run(rank, 2)
    assert machine.threads is None
    assert [line.partition(":")[0] for line in machine.said] == [f"rank {rank} runs on all cores" for rank in range(2)]
    assert "Operation not permitted" in machine.said[0]
