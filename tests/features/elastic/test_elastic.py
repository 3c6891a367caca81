"""Nodes that leave and join a run under torchrun: the ranks change, and the curve is that of the undisturbed run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from signal import SIGTERM
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.helpers import processes, warm
from tests.helpers.nodes import Node, connected_nodes, problem, two_nodes
from tests.helpers.tiny_run import write_tiny_run
from tests.helpers.training import tiny_recipe
from tests.launch.test_launchers import free_port
from tests.launch.test_two_nodes import BIN, LAUNCHERS, assert_same, finish, numbers
from trainer.base.errors import ExitCode
from trainer.checkpoint.store import CheckpointStore
from trainer.features.elastic import run
from trainer.features.host_memory.folder import folder_of_run
from trainer.observe.heartbeat import Status, read_statuses
from trainer.ranks.environment import LaunchEnvironment

WHY_NOT = problem()
CONF = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=5"
ELASTIC = {"strategy": "fsdp", "elastic": "data"}


def recipe_of(folder: Path, steps: int, **parallel: Any) -> Path:
    return write_tiny_run(
        folder,
        parallel=parallel,
        training={"max_steps": steps, "micro_batch_size": 1},
        evaluation={"every": None},
        checkpoint={"every": "2 steps"},
    )


def undisturbed(folder: Path, steps: int) -> Path:
    """Train on one process, and return the recipe."""
    recipe = recipe_of(folder, steps)
    assert finish([warm.start(["run", recipe])])[0][0] == 0
    return recipe


def assert_same_training(recipe: Path, other: Path) -> None:
    assert_same(recipe, numbers(other))
    weights, others = (load_file(one.parent / "run" / "model" / "model.safetensors") for one in (recipe, other))
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        if not name.endswith("key.bias"):  # its gradient is rounding alone, which Adam scales to whole steps
            torch.testing.assert_close(
                weight, others[name], rtol=1e-5, atol=1e-6, msg=lambda text, name=name: name + text
            )


def layouts(recipe: Path) -> list[str]:
    """Return the layouts of the starts of a run, in order."""
    lines = map(json.loads, (recipe.parent / "run" / "metrics.jsonl").read_text().splitlines())
    return [line["run"]["layout"] for line in lines if "run" in line]


def rank_of(rank: int, size: int, recipe: Path, *overrides: str, **variables: str) -> warm.WarmProcess:
    """Start a rank as torchrun would, on a node of its own."""
    place = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": "1"}
    torchrun = {"TORCHELASTIC_RUN_ID": "x", "PET_NNODES": "1:4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    return warm.start(["run", recipe, *overrides], **place | torchrun | variables)


@pytest.mark.slow
@pytest.mark.parametrize("signal", [None, SIGTERM])
def test_a_rank_too_many_waits_for_the_others(signal, tmp_path):
    recipe, port, memory = recipe_of(tmp_path, 8, **ELASTIC), str(free_port()), tmp_path / "memory"
    memory.mkdir()
    kept = f'checkpoint.memory={{"every": "1 step", "folder": "{memory}"}}'
    ranks = [rank_of(rank, 3, recipe, kept, MASTER_PORT=port) for rank in range(3)]
    if signal:
        wait_for(lambda: statuses(recipe), "the first step")
        ranks[0].send_signal(signal)
    ended = finish(ranks)
    code = ExitCode.STOPPED if signal else ExitCode.DONE
    assert [code for code, _ in ended] == [code] * 3
    assert "rank 2 on" in ended[2][1]
    assert "waits as a spare: the recipe uses 2 of the 3 processes" in ended[2][1]
    assert layouts(recipe) == ["dp_shard 2"]
    assert list(memory.iterdir()) == []
    if not signal:
        assert_same_training(recipe, undisturbed(tmp_path / "whole", 8))


@pytest.mark.parametrize(
    ("override", "variable", "message"),
    [
        ("parallel.elastic=none", "False", "error: `parallel.elastic` must name the axis that follows the nodes"),
        ("parallel.elastic=data", "True", "error: TORCH_DISABLE_SHARE_RDZV_TCP_STORE must be 1"),
    ],
)
def test_a_launch_that_could_not_change_is_refused(override, variable, message, tmp_path):
    rank = rank_of(0, 2, recipe_of(tmp_path, 8), override, TORCHELASTIC_USE_AGENT_STORE=variable)
    ((code, said),) = finish([rank])
    assert code == ExitCode.USER
    assert message in said


def statuses(recipe: Path) -> dict[int, Status]:
    return read_statuses(recipe.parent / "run")


def wait_for(condition: Callable[[], object], what: str, seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not seen in {seconds:g} s: {what}"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("code", "is_freed"), [(ExitCode.DONE, True), (ExitCode.STOPPED, True), (ExitCode.FAILED, False)]
)
def test_a_spare_rank_frees_the_memory_of_its_host_at_the_end(code, is_freed, tmp_path, monkeypatch):
    recipe = tiny_recipe(
        checkpoint={
            "folder": str(tmp_path / "run"),
            "every": "4 steps",
            "memory": {"every": "2 steps", "folder": str(tmp_path)},
        }
    )
    share = folder_of_run(tmp_path, tmp_path / "run") / "key" / "rank-00000-of-00002"
    share.mkdir(parents=True)
    monkeypatch.setattr(run, "_AGENT_SECONDS", 0.0)
    monkeypatch.setattr(run, "dismissed", lambda meeting: code)
    plan = SimpleNamespace(layout=SimpleNamespace(world_size=2))
    spare = LaunchEnvironment("torchrun", rank=2, world_size=3, local_world_size=1)
    # The shares are still there, as if it had to leave them.
    assert run.wait_as_spare(recipe, plan, spare, SimpleNamespace()) == code
    assert share.exists() != is_freed


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[Node, Node]]:
    with two_nodes(tmp_path) as both:
        yield both


@pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "there are nodes")
class TestTorchrun:
    def agent(self, node: Node, recipe: Path, times: int, number: str = "1:2") -> subprocess.Popen[str]:
        sizes = {"NODES": number, "PROCESSES": "1", "RESTARTS": str(times), "RENDEZVOUS": "c10d"}
        meeting = {"MASTER_ADDR": "node0", "ADDRESS": node.address, "RENDEZVOUS_CONF": CONF}
        path = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
        return processes.start(node.command([LAUNCHERS / "torchrun_multi_node.sh", recipe]), **sizes, **meeting, **path)

    @pytest.mark.slow
    @pytest.mark.timeout(900)
    @pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.nightly)])
    def test_a_node_leaves_and_joins(self, times, nodes, tmp_path, started):
        """Kill the second node, let the first one go on alone, and start the second one again."""
        steps = 30 + 15 * times
        whole, recipe = undisturbed(tmp_path / "whole", steps), recipe_of(tmp_path, steps, **ELASTIC)
        # Each departure counts as a failure of the node that stays; a node that joins must not.
        first, second = (self.agent(node, recipe, times) for node in nodes)
        started += [first, second]
        for count in range(times):
            train_on(recipe, {"node0", "node1"})
            if count % 2:
                second.terminate()
                processes.finish(second)
            else:
                processes.kill(second)
            alone = train_on(recipe, {"node0"})
            alone.suspend()  # until the other node has come, however long that takes
            second = self.agent(nodes[1], recipe, times)
            started.append(second)
            wait_for(lambda rank=alone: has_pending_sigterm(rank), "SIGTERM of the agent")
            alone.resume()

        ended = [processes.finish(agent, 240) for agent in (first, second)]
        print(*(agent.stdout + agent.stderr for agent in ended), sep="\n")
        assert [agent.returncode for agent in ended] == [0, 0]
        assert layouts(recipe)[-2 * times - 1 :] == ["dp_shard 2"] + ["one process", "dp_shard 2"] * times
        assert_same_training(recipe, whole)

    @pytest.mark.nightly
    @pytest.mark.timeout(1800)
    def test_a_spare_hands_its_shares_over(self, tmp_path, started):
        """Kill one of four nodes: two of the other three train, and one of these has a share that only it holds."""
        memory, steps = tmp_path / "memory", 60
        memory.mkdir()
        whole = undisturbed(tmp_path / "whole", steps)
        recipe = recipe_of(tmp_path, steps, **ELASTIC)
        keys = json.loads(recipe.read_text())
        keys["checkpoint"] |= {"every": None, "memory": {"every": "1 step", "folder": str(memory)}}
        keys["logging"]["to"] = ["console", "jsonl"]
        recipe.write_text(json.dumps(keys))
        with connected_nodes(tmp_path, 4) as nodes:
            for node in nodes:
                (tmp_path / node.name).mkdir()
            with_memory = {node.name: node.with_memory(tmp_path / node.name, memory) for node in nodes}
            agents = {name: self.agent(node, recipe, 2, "1:4") for name, node in with_memory.items()}
            started += agents.values()
            wait_for(
                lambda: len(statuses(recipe)) == 4 and all(at.step > 3 for at in statuses(recipe).values()), "4", 600
            )
            found = statuses(recipe)
            lost = found[3].host if found[3].host != "node0" else found[2].host  # its neighbour will be the spare
            processes.kill(agents.pop(lost))
            ended = [processes.finish(agent, 600) for agent in agents.values()]
        output = "\n".join(agent.stdout + agent.stderr for agent in ended)
        print(output)
        assert [agent.returncode for agent in ended] == [0, 0, 0]
        assert layouts(recipe) == ["dp_shard 4", "dp_shard 2"]
        assert "1 share came from hosts of spare ranks" in output
        assert re.search(r"resumed from the checkpoint of step \d+ in memory", output)
        assert not any(list((tmp_path / name).iterdir()) for name in agents), "all hosts are freed"
        assert_same_training(recipe, whole)


def train_on(recipe: Path, hosts: set[str]) -> psutil.Process:
    """Wait until living ranks on these hosts train and have saved a checkpoint, and return the process of rank 0."""

    def living() -> list[Status]:
        found = [*statuses(recipe).values()]
        there = {one.host for one in found} == hosts and all(psutil.pid_exists(one.pid) for one in found)
        return [one for one in found if one.doing.startswith("in step")] if there else []

    wait_for(living, f"ranks on {hosts}")
    first = min(one.step for one in living())
    store = CheckpointStore(recipe.parent / "run", keep=1)
    wait_for(lambda: max(store.steps(), default=0) > first, f"a checkpoint of the ranks on {hosts}")
    return psutil.Process(statuses(recipe)[0].pid)


def has_pending_sigterm(process: psutil.Process) -> bool:
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
    return bool(int(lines["ShdPnd"], 16) & 1 << (SIGTERM - 1))
