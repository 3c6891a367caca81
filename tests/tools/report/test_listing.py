"""Listings of runs: their states, and folders that are no runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.tiny_run import write_tiny_run
from tests.tools.report.test_report import steps, write_lines
from trainer.cli import main
from trainer.observe.heartbeat import Heartbeat

_HOLD = """
import sys
from pathlib import Path
from trainer.checkpoint.owner import FolderOwner
with FolderOwner(Path(sys.argv[1])) as owner:
    owner.take()
    print("held", flush=True)
    sys.stdin.read()
"""


def listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, object]]:
    capsys.readouterr()
    assert main(["runs", str(folder), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return {os.path.relpath(row["folder"], folder): row for row in rows}


def test_the_states_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    recipe = str(write_tiny_run(tmp_path))
    assert main(["run", recipe, "training.max_steps=3"]) == 0
    assert (
        main(["run", recipe, "training.max_steps=3", "training.stop_at_step=1", f"checkpoint.folder={tmp_path}/a/b"])
        == 75
    )
    write_lines(tmp_path / "killed", {"run": {"total_steps": 9}}, *steps(1.0))
    write_lines(tmp_path / "earlier", {"run": {"total_steps": 2}}, *steps(1.0, 0.5))
    ended = {
        "step": 1,
        "end": {"outcome": "failed", "exit_code": 1, "message": "rank 1 died\nof old age", "idle": None},
    }
    write_lines(tmp_path / "again", {"run": {}}, *steps(1.0), ended, {"run": {"resumed_from": 1}})
    write_lines(tmp_path / "failed", {"run": {}}, *steps(1.0), ended)
    write_lines(tmp_path / "early", {"run": {"total_steps": 40}}, ended | {"step": 3})
    write_lines(tmp_path / "saved", {"run": {"total_steps": 40}})
    (tmp_path / "saved" / "checkpoints" / "step-00000002").mkdir(parents=True)
    Heartbeat(write_lines(tmp_path / "beating", {"run": {"total_steps": 40}}), 0).begin(7)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "metrics.jsonl").write_text("no\nmetrics\n")
    (tmp_path / "a" / "deep" / "er" / "still").mkdir(parents=True)
    found = listed(tmp_path, capsys)
    assert {name: row["state"] for name, row in found.items()} == {
        "a/b": "stopped",
        "again": "killed",
        "beating": "killed",
        "damaged": "unreadable",
        "earlier": "finished",
        "early": "failed",
        "failed": "failed",
        "killed": "killed",
        "run": "finished",
        "saved": "killed",
    }
    # Before the first line of the log, the end, a checkpoint or a heartbeat has the step.
    assert [found[name]["step"] for name in ("early", "saved", "beating")] == [3, 2, 7]
    run = found["run"]
    assert (run["step"], run["total_steps"], run["message"]) == (3, 3, None)
    assert run["num_bytes"] == sum(path.lstat().st_size for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert main(["runs", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert f"failed    {tmp_path}/failed: rank 1 died\n" in shown
    assert "of old age" not in shown


def test_a_run_of_a_living_process_is_running(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = write_lines(tmp_path / "run", {"run": {"total_steps": 9}}, *steps(1.0))
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert listed(tmp_path, capsys)["run"]["state"] == "running"
        holder.send_signal(signal.SIGKILL)
        holder.wait(timeout=60)
        assert listed(tmp_path, capsys)["run"]["state"] == "killed"
    finally:
        holder.kill()
        holder.communicate()


def test_a_folder_without_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert listed(tmp_path, capsys) == {}
    assert main(["runs", str(tmp_path / "absent")]) == 2
    assert "must be a folder with runs" in capsys.readouterr().err
