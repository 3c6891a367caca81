"""The error of a full memory, with its advice, and the planned memory before the first step."""

from __future__ import annotations

import errno
import io
import json
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.tiny_run import write_tiny_run
from trainer.cli import main
from trainer.ranks.environment import LaunchEnvironment, without_ranks
from trainer.recipe.reading.loading import load_recipe
from trainer.tools import advice
from trainer.tools.memory import MemoryAdvice
from trainer.training.loop import Loop

MADE = {
    "fits": False,
    "needed_bytes": 5 * 2**30,
    "memory_bytes": 4 * 2**30,
    "ranks": [
        {"peak_bytes": 2**30, "peak": {"parameters": 2**30}, "peak_module": ""},
        {"peak_bytes": 4 * 2**30, "peak": {"activations": 3 * 2**30, "parameters": 2**30}, "peak_module": "bert"},
    ],
    "changes": [{"overrides": ["precision=bf16", "parallel.tensor=2"], "needed_bytes": 2**30}],
}


def child(monkeypatch: pytest.MonkeyPatch, code: str) -> list[list[str]]:
    """Let a short program stand for planning commands, and return their words."""
    started: list[list[str]] = []

    def start(command: list[str], *options: str) -> subprocess.Popen[str]:
        started.append([*command, *options])
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen([sys.executable, "-S", "-c", code], text=True, **pipes)

    monkeypatch.setattr(advice, "start_plan", start)
    return started


def answers(made: dict[str, Any]) -> str:
    return f"print({json.dumps(json.dumps(made))})"


@pytest.mark.parametrize("raises", [pytest.param("torch", marks=pytest.mark.slow), "cuda"])
def test_the_error_ends_with_the_peak_and_changes_of_its_planning_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], raises: str
):
    def step(loop: Loop) -> None:
        if raises == "torch":
            torch.empty(2**58)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore lines of torch.")

    monkeypatch.setattr(Loop, "run", step)
    started = child(monkeypatch, answers(MADE))
    assert main(["run", str(write_tiny_run(tmp_path)), "training.micro_batch_size=3"]) == 1
    shown = capsys.readouterr().err
    assert "is full (" in shown
    assert "Traceback" not in shown
    assert "More lines" not in shown
    assert "planned peak: 4.00 GiB in bert, mostly activations (3.00 GiB)" in shown
    assert "needs 5.00 GiB of 4.00 GiB\nthese changes fit:\n  precision=bf16 parallel.tensor=2  (1.00 GiB)" in shown
    (command,) = started
    assert shlex.join(command[:-1]) in shown
    assert command[:2] == ["trainer", "plan"]
    assert "training.micro_batch_size=3" in command
    if raises == "torch":
        with redirect_stdout(io.StringIO()) as text:
            assert main(command[1:]) == 0
        assert json.loads(text.getvalue())["fits"]


def test_the_error_stays_without_memory_for_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def step(loop: Loop) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def start(*_: str) -> subprocess.Popen[str]:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(Loop, "run", step)
    monkeypatch.setattr(advice, "start_plan", start)
    assert main(["run", str(write_tiny_run(tmp_path))]) == 1
    assert "is full (CUDA out of memory.)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (answers({"needed_bytes": 3 * 2**30}), "planned memory: 3.00 GiB of 4.00 GiB on each GPU"),
        (answers({"needed_bytes": 5 * 2**30}), "5.00 GiB, but each GPU has 4.00 GiB; this shows changes that fit: tra"),
        (
            "raise SystemExit('no GPU')",
            "not planned: the plan failed with exit code 1 (no GPU); this command",
        ),
        ("print('a warning')", "not planned: the plan is no JSON ('a warning\\n'); this command"),
        ("import time; time.sleep(60)", "not planned: the plan was not ready in time; this command"),
    ],
)
def test_rank_0_notes_the_planned_memory_of_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, words: str
):
    resolved = load_recipe(str(write_tiny_run(tmp_path)), [])
    ranks = [LaunchEnvironment("torchrun", rank, rank, 2, 2) for rank in range(2)]
    started = child(monkeypatch, code)
    with MemoryAdvice(resolved, ranks[0]) as made:
        assert made.notes() == []  # there is no GPU
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(advice, "_gibibytes", lambda environment: 4.0)
    if "sleep" in code:
        monkeypatch.setattr(advice, "_WAIT_SECONDS", 0.1)
    else:
        monkeypatch.setattr(advice, "_WAIT_SECONDS", 30.0)
    with MemoryAdvice(resolved, ranks[1]) as made:
        assert made.notes() == []
    assert not started
    with MemoryAdvice(resolved, ranks[0]) as made:
        (note,) = made.notes()
    assert words in note
    assert ("2x4.0GiB" in note) == ("command" in note or "changes" in note)
    assert started == [["trainer", "plan", str(resolved.file), "--gpus", "2x1GiB", "--json", "--changes", "0"]]


def test_a_planning_process_is_no_rank():
    ranks = {"RANK": "1", "MASTER_ADDR": "a", "SLURM_PROCID": "3", "TORCHELASTIC_RUN_ID": "x", "HF_HOME": "/h"}
    assert without_ranks(ranks) == {"HF_HOME": "/h", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_advice_comes_from_a_process_that_runs_this_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    recipe = write_tiny_run(tmp_path)
    (tmp_path / "trainer.py").write_text("raise SystemExit('not the package')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(advice, "_ADVICE_SECONDS", 400.0)
    found = advice.advice(["trainer", "plan", str(recipe), "--gpus", "1x4GiB"])
    assert found is not None
    assert "so the plan fits" in found
