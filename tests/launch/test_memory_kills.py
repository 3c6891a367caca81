"""Ranks that are killed, and resume from checkpoints in memory: the weights equal those of an undisturbed run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers import processes, warm
from tests.helpers.tiny_run import write_tiny_run
from tests.helpers.turns import once
from tests.launch.test_two_nodes import BIN
from trainer.base.errors import ExitCode
from trainer.observe.heartbeat import read_statuses

STEPS = 40
RESUMED = re.compile(r"resumed from the checkpoint of step (\d+) (in memory|on the disk).*on the disk is (.*)")


Process = warm.WarmProcess | subprocess.Popen[str]
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "zero1": {"strategy": "zero1"},
    "zero2": {"strategy": "zero2"},
    "zero3": {"strategy": "zero3"},
    "tensor": {"tensor": 2},
    "stages": {"pipeline": {"stages": 2, "microbatches": 2}},
}
IN_CI = "tensor"


def write(
    folder: Path, every: str | None = None, steps: int = STEPS, memory: str | None = None, layout: str = IN_CI
) -> Path:
    """Write a recipe with checkpoints in memory every 3 steps, in a folder of the test or in `memory`."""
    (folder / "memory").mkdir(parents=True)
    return write_tiny_run(
        folder,
        parallel=LAYOUTS[layout],
        training={"max_steps": steps},
        evaluation={"every": None},
        checkpoint={"every": every, "memory": {"every": "3 steps", "folder": memory or str(folder / "memory")}},
        logging={"every": "1 step", "to": ["console", "jsonl"]},
    )


def start(recipe: Path, *options: str) -> warm.WarmProcess:
    return warm.start(["run", recipe, "--processes", "2", *options])


def start_torchrun(recipe: Path) -> subprocess.Popen[str]:
    """Start the ranks by torchrun, whose agent restarts them."""
    command = [BIN / "torchrun", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2", "--no-python"]
    variables = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    return processes.start([*command, "trainer", "run", recipe], **variables)


def finish(process: Process, seconds: float = 240.0) -> str:
    """Wait for the end of a run, and return its output."""
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        processes.kill(process)
    print(out, err, sep="\n")
    return out + err


def weights(recipe: Path) -> bytes:
    return (recipe.parent / "run" / "model" / "model.safetensors").read_bytes()


def undisturbed(folder: Path, steps: int = STEPS, layout: str = IN_CI) -> bytes:
    def train() -> bytes:
        recipe = write(folder, steps=steps, layout=layout)
        process = start(recipe)
        finish(process)
        assert process.returncode == ExitCode.DONE
        assert list((folder / "memory").iterdir()) == [], "the end frees the memory"
        return weights(recipe)

    return once(f"memory: {steps} undisturbed steps under {layout}", train)


def kill_at(process: Process, folder: Path, step: int, rank: int) -> None:
    """Kill a rank when all ranks have come to a step."""
    end = time.monotonic() + 240
    while True:
        statuses = read_statuses(folder)
        if len(statuses) == 2 and all(status.step >= step for status in statuses.values()):
            break
        assert time.monotonic() < end, "the run has not come that far"
        assert process.poll() is None, "the run has ended"
        time.sleep(0.01)
    psutil.Process(statuses[rank].pid).kill()


@pytest.mark.parametrize(
    ("launcher", "layout"),
    [
        pytest.param("trainer", IN_CI, marks=pytest.mark.slow),
        *(pytest.param("trainer", layout, marks=pytest.mark.nightly) for layout in LAYOUTS if layout != IN_CI),
        *(pytest.param("torchrun", layout, marks=pytest.mark.nightly) for layout in LAYOUTS),
    ],
)
def test_a_killed_rank_resumes_from_memory(launcher, layout, tmp_path):
    recipe = write(tmp_path / "killed", layout=layout)
    process = start_torchrun(recipe) if launcher == "torchrun" else start(recipe, "--max-restarts", "2")
    kill_at(process, tmp_path / "killed" / "run", step=8, rank=1)
    output = finish(process)
    assert process.returncode == ExitCode.DONE
    (found,) = RESUMED.findall(output)
    assert int(found[0]) >= 6
    assert found[1:] == ("in memory", "none")
    assert weights(recipe) == undisturbed(tmp_path / "whole", layout=layout)


@pytest.mark.slow
def test_damaged_memory_falls_back_to_the_disk(tmp_path):
    recipe = write(tmp_path / "killed", every="4 steps")
    process = start(recipe)
    kill_at(process, tmp_path / "killed" / "run", step=11, rank=0)
    assert "was killed by SIGKILL" in finish(process)
    for share in (tmp_path / "killed" / "memory").rglob("state-*.safetensors"):
        content = share.read_bytes()
        share.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    again = start(recipe)
    output = finish(again)
    assert again.returncode == ExitCode.DONE
    (found,) = RESUMED.findall(output)
    assert found[1:] == ("on the disk", f"that of step {found[0]}")
    assert "does not match its checksum" in output
    assert weights(recipe) == undisturbed(tmp_path / "whole")


LARGER = {"hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 1024, "vocab_size": 8000}


@pytest.mark.nightly
@pytest.mark.alone
@pytest.mark.parametrize("in_memory", [True, False], ids=["memory", "disk"])
def test_seconds_from_a_kill_to_the_step_after_it(tmp_path, in_memory):
    """Kill a run at step 35, with checkpoints on the disk every 20 steps, and measure its restart (`pytest -s`)."""
    recipe = write(tmp_path / "killed", every="20 steps", steps=60, memory="/dev/shm")
    keys = json.loads(recipe.read_text())
    keys["model"]["config"] |= LARGER
    if not in_memory:
        del keys["checkpoint"]["memory"]
    recipe.write_text(json.dumps(keys))
    folder = recipe.parent / "run"
    process = start(recipe, "--max-restarts", "1")
    kill_at(process, folder, 35, rank=1)
    begun, before = time.monotonic(), read_statuses(folder)
    killed_at, old = max(status.step for status in before.values()), {status.pid for status in before.values()}
    seconds: dict[int, float] = {}  # from the kill, by the step that rank 0 has taken
    while process.poll() is None:
        status = read_statuses(folder).get(0)
        if status is not None and status.pid not in old:
            seconds.setdefault(status.step, time.monotonic() - begun)
        time.sleep(0.005)
    finish(process)
    assert process.returncode == ExitCode.DONE
    first, regained = sorted(seconds)[1], min(step for step in seconds if step > killed_at)
    assert first <= 21 if not in_memory else first > 31
    shown = ", ".join(f"step {step} after {seconds[step]:.1f} s" for step in (first, regained))
    print(f"killed in step {killed_at + 1}: {shown}")
