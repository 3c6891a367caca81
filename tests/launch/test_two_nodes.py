"""Two nodes with gloo between them. Each is a network namespace with its own address, name and hosts file.

The ranks start warm, with the variables that any launcher can set, or by a torchrun that starts as it does for a user.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers import processes, warm
from tests.helpers.nodes import Node, closed, problem, two_nodes
from tests.helpers.tiny_run import write_tiny_run
from tests.helpers.turns import once
from tests.launch.test_launchers import free_port, programs
from trainer.observe.heartbeat import read_statuses
from trainer.tools.run_metrics import Metrics, read_metrics

WHY_NOT = problem()
pytestmark = [
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "there are nodes"),
]

BIN = Path(sys.executable).parent
LAUNCHERS = processes.ROOT / "launchers"
PORT = "29500"  # free in the namespaces, in which nothing else listens
SHOWN = {"every": "1 step", "to": ["console", "jsonl"]}
LAYOUTS = {
    "hsdp": {"strategy": "hsdp"},
    "pipeline": {"pipeline": {"stages": 2, "microbatches": 2}},
}


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Node]]:
    with two_nodes(tmp_path_factory.mktemp("nodes")) as both:
        yield both


def start(
    node: Node,
    first_rank: int,
    recipe: Path,
    *overrides: str,
    world_size: int = 4,
    **variables: str,
) -> list[warm.WarmProcess]:
    """Start the ranks of one node, which are half of all ranks."""
    size = world_size // 2
    ours = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "node0", "MASTER_PORT": PORT}
    return [
        warm.start(
            ["run", recipe, *overrides],
            node=node,
            **ours | {"RANK": str(first_rank + local), "LOCAL_RANK": str(local)} | variables,
        )
        for local in range(size)
    ]


def finish(ranks: Sequence[warm.WarmProcess], seconds: float = 240.0) -> list[tuple[int | None, str]]:
    """Wait for the ranks. Return the exit code and the stderr of each."""
    ended = []
    try:
        for rank in ranks:
            out, err = rank.communicate(timeout=seconds)
            print(f"--- {rank.returncode}", out, err, sep="\n")
            ended.append((rank.returncode, err))
    finally:
        for rank in ranks:
            processes.kill(rank)  # type: ignore[arg-type]
    return ended


def numbers(recipe: Path) -> Metrics:
    return read_metrics(recipe.parent / "run" / "metrics.jsonl")


def on_one_process(folder: Path, **training: Any) -> Metrics:
    """Train on one process and return its metrics."""
    recipe = write_tiny_run(folder, training=training)
    assert finish([warm.start(["run", recipe])])[0][0] == 0
    return numbers(recipe)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Metrics:
    """The metrics of the recipe on one process."""
    return once("nodes: one process", lambda: on_one_process(tmp_path_factory.mktemp("one")))


def assert_same(recipe: Path, whole: Metrics) -> None:
    assert len(numbers(recipe).steps) == len(whole.steps)
    for one, other in zip(numbers(recipe).steps, whole.steps, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-5)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)


@pytest.mark.parametrize(
    ("layout", "written"),
    [
        pytest.param("hsdp", "dp_replicate 2 x dp_shard 2", marks=pytest.mark.slow),
        pytest.param("pipeline", "pp 2 x dp_replicate 2", marks=pytest.mark.nightly),
    ],
)
def test_two_nodes_train_as_one_process(layout, written, nodes, one_process, tmp_path):
    recipe = write_tiny_run(tmp_path, parallel=LAYOUTS[layout])
    ended = finish([*start(nodes[0], 0, recipe), *start(nodes[1], 2, recipe)])
    assert [code for code, _ in ended] == [0] * 4
    assert_same(recipe, one_process)
    header = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])["run"]
    assert header["layout"] == written


def two_ranks(
    nodes: Sequence[Node],
    recipe: Path,
    *overrides: str,
    more: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> list[tuple[int | None, str]]:
    """Run one rank on each node, the second with `more` overrides and `variables`. Return exit codes and stderr."""
    ranks = [
        *start(nodes[0], 0, recipe, *overrides, world_size=2),
        *start(nodes[1], 1, recipe, *overrides, *more, world_size=2, **(variables or {})),
    ]
    return finish(ranks)


SHORT = "parallel.join_timeout=4 seconds"


class TestWhatIsWrongIsSaid:
    @pytest.mark.parametrize(
        ("address", "answer"),
        [("10.77.0.9", ""), ("node7", "the host name node7 cannot be resolved")],
    )
    def test_a_wrong_address(self, nodes, tmp_path, address, answer):
        first, second = two_ranks(nodes, write_tiny_run(tmp_path), SHORT, variables={"MASTER_ADDR": address})
        assert (first[0], second[0]) == (1, 1)
        assert f"error: rank 1 on node1 could not join the others at {address}:{PORT} ({answer}" in second[1]
        assert (
            f"error: rank 0 on node0 waited at node0:{PORT}, but only 1 of 2 ranks have joined, without rank 1"
            in first[1]
        )

    def test_a_port_that_is_closed(self, nodes, tmp_path):
        with closed(nodes[0], PORT):
            first, second = two_ranks(nodes, write_tiny_run(tmp_path), SHORT)
        assert (first[0], second[0]) == (1, 1)
        assert f"could not join the others at node0:{PORT} (no answer: a firewall" in second[1]
        assert "only 1 of 2 ranks have joined" in first[1]

    @pytest.mark.slow
    def test_ports_between_ranks_that_are_closed(self, nodes, tmp_path):
        with closed(nodes[0], "32768-60999"):  # the ports on which rank 0 listens, without MASTER_PORT
            ended = two_ranks(nodes, write_tiny_run(tmp_path))
        for code, said in ended:
            assert code == 1
            assert re.search(r"error: rank [01] on node[01]: its interface eth0 \(.*\) cannot connect to rank", said)
            assert "node1 has eth0 (10.77.0.2), mgmt (192.168.77.2)" in said

    def test_an_interface_that_does_not_lead_to_the_others(self, nodes, tmp_path):
        ended = two_ranks(nodes, write_tiny_run(tmp_path), variables={"GLOO_SOCKET_IFNAME": "mgmt"})
        assert [code for code, _ in ended] == [1, 1]
        assert all("cannot connect to rank 1 on node1 at 192.168.77.2:" in said for _, said in ended)
        assert all("or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME on each machine" in said for _, said in ended)

    def test_an_interface_that_is_not_there(self, nodes, tmp_path):
        ended = two_ranks(nodes, write_tiny_run(tmp_path), variables={"GLOO_SOCKET_IFNAME": "ib0"})
        assert [code for code, _ in ended] == [2, 2]
        assert all("rank 1 on node1: GLOO_SOCKET_IFNAME is ib0, but node1 has eth0" in said for _, said in ended)

    def test_recipes_that_differ(self, nodes, tmp_path):
        ended = two_ranks(nodes, write_tiny_run(tmp_path), more=["training.seed=7"])
        assert [code for code, _ in ended] == [2, 2]
        assert all("`training.seed` is 42 on rank 0 (node0), 7 on rank 1 (node1)" in said for _, said in ended)

    def test_data_that_one_node_does_not_have(self, nodes, tmp_path):
        recipe, data = write_tiny_run(tmp_path), tmp_path / "data"
        data.mkdir()
        (tmp_path / "train.jsonl").rename(data / "train.jsonl")
        second = nodes[1].without(data)
        ((code, said),) = finish(start(second, 1, recipe, f"data.train={data}/train.jsonl", world_size=2))
        assert code == 2
        assert f"error: rank 1 on node1: command line: `data.train` is a file that does not exist: {data}" in said

    def test_a_folder_that_is_not_shared(self, nodes, tmp_path):
        recipe = write_tiny_run(tmp_path)
        (tmp_path / "run").mkdir()
        ended = two_ranks([nodes[0], nodes[1].without(tmp_path / "run")], recipe, SHORT)
        assert [code for code, _ in ended] == [2, 2]
        for _, said in ended:
            assert "`checkpoint.folder` must be one folder for all ranks" in said
            assert "is another one for rank 1 on node1 than for rank 0" in said
        assert [file.name for file in (tmp_path / "run" / "checkpoints").iterdir()] == []


@pytest.mark.slow
def test_a_node_that_was_killed_and_started_again_goes_on(nodes, one_process, tmp_path):
    recipe = write_tiny_run(tmp_path, parallel=LAYOUTS["hsdp"], checkpoint={"every": "2 steps"})
    survivors, killed = start(nodes[0], 0, recipe), start(nodes[1], 2, recipe)
    try:
        wait_for_step(tmp_path / "run", 3)
    finally:
        for rank in killed:
            processes.kill(rank)  # type: ignore[arg-type]
    for code, said in finish(survivors):
        assert code == 1
        assert "another rank failed or was killed" in said
    finish(killed)
    assert len(numbers(recipe).steps) < len(one_process.steps)
    assert [code for code, _ in finish([*start(nodes[0], 0, recipe), *start(nodes[1], 2, recipe)])] == [0] * 4
    assert_same(recipe, one_process)


@pytest.mark.slow
def test_a_node_that_was_lost_with_its_memory_resumes_from_the_copies(nodes, undisturbed, tmp_path):
    keys = {"every": None, "memory": {"every": "3 steps", "folder": str(tmp_path / "memory")}}
    recipe = write_tiny_run(
        tmp_path, parallel={"strategy": "fsdp"}, training={"max_steps": LONG}, checkpoint=keys, logging=SHOWN
    )
    (tmp_path / "memory").mkdir()
    both = []
    for node, name in zip(nodes, ("memory0", "memory1"), strict=True):
        (tmp_path / name).mkdir()
        both.append(node.with_memory(tmp_path / name, tmp_path / "memory"))

    def started() -> list[warm.WarmProcess]:
        return [rank for number, node in enumerate(both) for rank in start(node, number, recipe, world_size=2)]

    ranks = started()
    try:
        wait_for_step(tmp_path / "run", 8)
    finally:
        for rank in ranks:
            processes.kill(rank)  # type: ignore[arg-type]
    finish(ranks)
    (lost,) = (tmp_path / "memory1").iterdir()
    shutil.rmtree(lost)
    first, second = started()
    output, _ = first.communicate(timeout=240)
    finish([second])
    print(output)
    assert first.returncode == second.returncode == 0
    assert re.search(r"resumed from the checkpoint of step \d+ in memory; the newest on the disk is none", output)
    assert_same(recipe, undisturbed)
    assert not list(tmp_path.glob("memory*/*")), "the end frees the memory"


LONG = 40  # steps: enough time to kill a process


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Metrics:
    """The metrics of `LONG` steps on one process."""
    return once("nodes: undisturbed", lambda: on_one_process(tmp_path_factory.mktemp("undisturbed"), max_steps=LONG))


class TestTorchrunHandsOutTheRanks:
    """Ranks of torchrun, with its `c10d` rendezvous. It restarts them itself, and they resume."""

    @pytest.fixture
    def recipe(self, tmp_path: Path) -> Path:
        keys = {"training": {"max_steps": LONG}, "checkpoint": {"every": "2 steps"}}
        return write_tiny_run(tmp_path, parallel={"strategy": "fsdp"}, **keys)

    def finish(self, started: Sequence[subprocess.Popen[str]]) -> None:
        ended = [processes.finish(process) for process in started]
        print(*(process.stdout + process.stderr for process in ended), sep="\n")
        assert [process.returncode for process in ended] == [0, 0]

    @pytest.mark.slow
    def test_a_node_that_was_killed_joins_again(self, nodes, recipe, undisturbed, started, tmp_path):
        def on(node: Node) -> subprocess.Popen[str]:
            sizes = {"NODES": "2", "PROCESSES": "1", "RESTARTS": "1"}
            meeting = {"MASTER_ADDR": "node0", "RENDEZVOUS": "c10d", "ADDRESS": node.address}
            command = node.command([LAUNCHERS / "torchrun_multi_node.sh", recipe])
            return processes.start(command, **sizes, **meeting, PATH=paths[node.name])

        folders = [tmp_path / node.name for node in nodes]
        with programs(folders[0], nodes[0]) as first, programs(folders[1], nodes[1]) as second:
            paths = {nodes[0].name: first, nodes[1].name: second}
            started.extend(on(node) for node in nodes)
            wait_for_step(recipe.parent / "run", 3)
            processes.kill(started[1])
            started.append(on(nodes[1]))
            self.finish([started[0], started[2]])
        assert_same(recipe, undisturbed)

    @pytest.mark.slow
    def test_a_rank_that_was_killed(self, recipe, undisturbed, started, tmp_path):
        """The rank's agent counts a restart, the other agent does not, and both keep the previous store."""
        options = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "1", "--rdzv-backend", "c10d"]
        place = ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--local-addr", "127.0.0.1"]
        command = [BIN / "torchrun", *options, *place, "--no-python", "trainer", "run", recipe]
        with programs(tmp_path / "bin") as path:
            started.extend(processes.start(command, PATH=path) for _ in range(2))
            wait_for_step(recipe.parent / "run", 3)
            (rank,) = psutil.Process(started[1].pid).children()
            rank.kill()
            self.finish(started)
        assert_same(recipe, undisturbed)


def wait_for_step(folder: Path, step: int) -> None:
    end = time.monotonic() + 240
    while not any(status.step >= step for status in read_statuses(folder).values()):
        assert time.monotonic() < end, "the run has not come that far"
        time.sleep(0.05)
