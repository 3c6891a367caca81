"""`trainer certify` in jobs of launchers: the first ranks train each layout, and all end if one does."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.helpers import processes, warm
from tests.helpers.nodes import Node, problem, two_nodes
from tests.helpers.tiny_run import write_tiny_run
from tests.launch.test_launchers import free_port
from trainer.tools.certificate.certifying import JSON
from trainer.tools.certificate.layouts import named_layouts

BIN = Path(sys.executable).parent
WHY_NOT = problem()


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_tiny_run(tmp_path, evaluation={"every": None}, training={"global_batch_size": 6})


def place(rank: int, size: int, port: str, launcher: str = "variables") -> dict[str, str]:
    """Return the variables of a rank on one machine."""
    if launcher == "srun":
        return {
            "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(size), "SLURM_STEP_TASKS_PER_NODE": str(size),
            "SLURM_NTASKS": str(size), "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "localhost", "MASTER_PORT": port,
            "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank),
        }  # fmt: skip
    return {
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "localhost", "MASTER_PORT": port,
    }  # fmt: skip


def words(recipe: Path, layouts: str, *more: str) -> list[str]:
    """Return the command line of a certificate of two steps."""
    options = [] if "--steps" in more else ["--steps", "2"]
    return ["certify", str(recipe), "--layouts", layouts, "--output", str(recipe.parent / "out"), *options, *more]


def finish(ranks: Sequence[warm.WarmProcess], seconds: float = 240.0) -> list[tuple[int | None, str, str]]:
    """Wait for the ranks; return exit code, stdout and stderr of each."""
    ended = []
    try:
        for rank in ranks:
            out, err = rank.communicate(timeout=seconds)
            ended.append((rank.returncode, out, err))
    finally:
        for rank in ranks:
            processes.kill(rank)  # type: ignore[arg-type]
    return ended


def certificate(recipe: Path) -> list[tuple[str, bool, int]]:
    """Return the name of each layout, whether it equals the reference, and its ranks."""
    found = json.loads((recipe.parent / "out" / JSON).read_text())
    return [(one["name"], one["equal"], one["processes"]) for one in found["layouts"]]


def test_layouts_take_the_ranks_of_the_job():
    found = named_layouts("fsdp; tensor=2; stages=4; zero1 processes=2", "bert_sample", [], None, 3)
    assert [one.processes for one in found] == [3, 2, 4, 2]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["variables", pytest.param("srun", marks=pytest.mark.nightly)])
def test_three_ranks(launcher: str, recipe: Path):
    # Two ranks of three, a number that does not divide the batch, and another engine between native ones.
    layouts = "tensor=2; fsdp; zero1 processes=2; fsdp global_batch_size=8"
    port = free_port()
    ranks = [warm.start(words(recipe, layouts), **place(rank, 3, port, launcher)) for rank in range(3)]
    ended = finish(ranks)
    assert [code for code, _, _ in ended] == [1, 1, 1], ended
    assert certificate(recipe) == [
        ("one process", True, 1), ("tensor=2", True, 2), ("strategy=fsdp", True, 3), ("strategy=zero1", True, 2),
        ("strategy=fsdp global_batch_size=8", False, 3),
    ]  # fmt: skip
    assert "failed: `training.global_batch_size` must be divisible by" in " ".join(ended[0][1].split())
    assert [out + err for _, out, err in ended[1:]] == ["", ""]  # rank 0 alone speaks


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["torch.distributed.run", "--nproc-per-node", "2", "-m"],
        pytest.param(
            [BIN / "accelerate", "launch", "--multi_gpu", "--num_processes", "2", "--no_python"],
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            [BIN / "accelerate", "launch", "--cpu", "--num_processes", "2", "--no_python"], marks=pytest.mark.nightly
        ),
    ],
    ids=["torchrun", "accelerate", "accelerate --cpu"],
)
@pytest.mark.usefixtures("warm_python")
def test_launchers(command: list[str | Path], recipe: Path):
    by_torchrun = command[0] == "torch.distributed.run"
    start = [sys.executable, "-m"] if by_torchrun else []
    port = ["--master-port" if by_torchrun else "--main_process_port", free_port()]
    program = "trainer" if by_torchrun else BIN / "trainer"
    started = [*start, *command[:-1], *port, command[-1], program, *words(recipe, "fsdp", "--against-first", "--json")]
    ended = processes.run(started)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["equal"]
    assert certificate(recipe) == [("strategy=fsdp", True, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("killed", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_all_end_if_a_rank_is_killed(killed: int, recipe: Path):
    port = free_port()
    long = words(recipe, "fsdp; tensor=2", "--steps", "16", "training.max_steps=16")
    ranks = [warm.start(long, **place(rank, 2, port)) for rank in range(2)]
    first = recipe.parent / "out" / "runs" / "1-strategy=fsdp" / "fingerprints"
    until = time.monotonic() + 120
    while not first.is_dir() and time.monotonic() < until:
        time.sleep(0.01)
    ranks[killed].send_signal(signal.SIGKILL)
    begin = time.monotonic()
    ended = finish(ranks)
    assert time.monotonic() - begin < 60
    assert ended[1 - killed][0] == 1
    assert f"rank {killed} of the job has ended" in " ".join(ended[1 - killed][2].split())
    assert not (recipe.parent / "out" / JSON).exists()


@pytest.mark.slow
def test_commands_that_differ_and_layouts_with_more_ranks_are_refused(recipe: Path):
    port = free_port()
    ranks = [
        warm.start(words(recipe, "fsdp", f"optimizer.learning_rate={rank + 1}e-3"), **place(rank, 2, port))
        for rank in range(2)
    ]
    for code, _, err in finish(ranks):
        assert code == 2
        assert "all ranks of a certificate must have the same recipe" in " ".join(err.split())
    ((code, _, err),) = finish([warm.start(words(recipe, "fsdp processes=4"), **place(0, 2, port))])
    assert code == 2
    assert "must have at most the 2 ranks of the job, but strategy=fsdp needs 4" in " ".join(err.split())


@pytest.mark.slow
@pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "there are nodes")
def test_two_nodes(recipe: Path, tmp_path: Path):
    def start(node: Node, first: int) -> list[warm.WarmProcess]:
        return [
            warm.start(
                words(recipe, "hsdp shard=2; tensor=2 processes=2; fsdp processes=3", "training.global_batch_size=12"),
                node=node,
                **place(first + local, 4, "29500")
                | {"LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node0"},
            )
            for local in range(2)
        ]

    with two_nodes(tmp_path) as (one, other):
        ended = finish([*start(one, 0), *start(other, 2)])
    assert [code for code, _, _ in ended] == [0] * 4, ended
    assert certificate(recipe) == [
        ("one process", True, 1), ("strategy=hsdp shard=2", True, 4), ("tensor=2", True, 2),
        ("strategy=fsdp", True, 3),
    ]  # fmt: skip
