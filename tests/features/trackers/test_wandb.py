"""W&B for real, offline: what its library has written is read back."""

import errno
import math
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from tests.features.trackers.tracked import offline_runs
from tests.helpers.processes import ROOT, environment
from tests.observe.samples import end_record, run_info, step_record
from trainer.base.errors import TrainerError, UsageError
from trainer.features.trackers import wandb as wandb_room
from trainer.features.trackers.tracking import Tracker
from trainer.features.trackers.wandb import WandbService
from trainer.observe.records import EvaluationRecord

# Its import takes seconds, so each worker would wait for it at the collection.
pytestmark = [pytest.mark.timeout(60), pytest.mark.skipif(find_spec("wandb") is None, reason="needs wandb")]


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """No account of whoever runs the tests, and another working folder than that of the run."""
    import wandb

    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(wandb, "run", None)  # what a run leaves that was killed
    yield
    wandb.teardown()


def write(folder: Path, steps: range, resumed_from: int | None = None, **end) -> list[str]:
    notes: list[str] = []
    tracker = Tracker(WandbService("a project"), notes.append)
    tracker.start(run_info(folder, resumed_from=resumed_from))
    for step in steps:
        tracker.step(step_record(step, loss=1 / step))
        if step % 2 == 0:
            tracker.evaluation(EvaluationRecord(step, {"accuracy": step / 7, "loss": float("nan")}))
    tracker.end(end_record(folder, **end))
    tracker.close()
    return notes


def core_processes() -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if "wandb-core" in child.name()]


@pytest.mark.slow
def test_the_run_reads_back(tmp_path):
    notes = write(tmp_path / "run", range(1, 5))
    (run,) = offline_runs(tmp_path / "run")
    assert (run.run.display_name, run.run.project, run.exit_code) == ("small", "a project", 0)
    assert run.config["training"] == {"epochs": 3}
    assert run.config["run"]["layout"] == "dp_replicate 2"
    assert run.config["run"]["versions"] == {"torch": "2.13.0"}
    assert [row["train/loss"] for row in run.history.values()] == [1 / step for step in range(1, 5)]
    assert [row.get("eval/accuracy") for row in run.history.values()] == [None, 2 / 7, None, 4 / 7]
    assert math.isnan(run.history[2]["eval/loss"])
    assert run.summary["best/accuracy"] == 0.8125
    assert run.summary["best/step"] == 230
    (folder,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    assert notes == [f"W&B: offline in {folder}; `wandb sync {folder}` sends it"]


def test_the_files_lie_in_the_run_and_the_library_collects_nothing(tmp_path):
    write(tmp_path / "run", range(1, 3))
    assert list((tmp_path / "elsewhere").iterdir()) == []
    (run,) = offline_runs(tmp_path / "run")
    assert run.run.host == ""
    assert not run.run.HasField("git")
    assert run.kinds <= {"header", "run", "telemetry", "summary", "history", "exit"}, "no files, statistics or output"
    (folder,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    assert [path for path in (folder / "files").rglob("*") if path.is_file()] == []


def test_a_stopped_run_goes_on_as_the_same_run(tmp_path):
    write(tmp_path, range(1, 6), outcome="stopped", exit_code=75)
    write(tmp_path, range(4, 8), resumed_from=3)
    first, second = offline_runs(tmp_path)
    assert first.run.run_id == second.run.run_id
    assert (first.exit_code, second.exit_code) == (75, 0)
    assert "preempting" in first.kinds
    assert "preempting" not in second.kinds
    assert list(second.history) == [4, 5, 6, 7]


def test_its_process_is_gone_after_the_end(tmp_path):
    tracker = Tracker(WandbService(None), print)
    tracker.start(run_info(tmp_path))
    (core,) = core_processes()
    assert "--no-observability" in core.cmdline(), "it reports nothing of its own"
    tracker.end(end_record(tmp_path))
    tracker.close()
    core.wait(10)


def test_its_process_dies_in_the_middle_and_the_training_goes_on(tmp_path):
    notes: list[str] = []
    tracker = Tracker(WandbService(None), notes.append)
    tracker.start(run_info(tmp_path))
    (core,) = core_processes()
    core.kill()
    core.wait(10)
    began = time.monotonic()
    for step in range(1, 5):
        tracker.step(step_record(step))
    tracker.end(end_record(tmp_path))
    tracker.close()
    assert time.monotonic() - began < 120, "it waits for a process that is gone"
    assert len(notes) > 1, "it was said"
    assert all(note.startswith("W&B") for note in notes)


def test_its_process_does_not_outlive_a_run_that_is_killed(tmp_path):
    code = (
        "import os, sys, psutil; from pathlib import Path\n"
        "from tests.observe.samples import run_info, step_record\n"
        "from trainer.features.trackers.tracking import Tracker\n"
        "from trainer.features.trackers.wandb import WandbService\n"
        "tracker = Tracker(WandbService(None), print); tracker.start(run_info(Path(sys.argv[1])))\n"
        "tracker.step(step_record(1))\n"
        "print(*[child.pid for child in psutil.Process().children() if 'wandb-core' in child.name()], flush=True)\n"
        f"os.kill(os.getpid(), {int(signal.SIGKILL)})"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    variables = environment(WANDB_MODE="offline", HOME=str(tmp_path))
    done = subprocess.run(command, cwd=ROOT, env=variables, timeout=480, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL
    pid = int(done.stdout)
    deadline = time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "wandb-core is left behind"
        time.sleep(0.1)


def test_a_folder_that_is_full_is_noted_and_the_training_goes_on(tmp_path, monkeypatch):
    write_bytes = Path.write_bytes

    def full(self: Path, content: bytes) -> int:
        if self.name == wandb_room._PROBE and "offline-run" in str(self):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_bytes(self, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    notes = "\n".join(write(tmp_path / "run", range(1, 5)))
    assert "W&B cannot be written ([Errno 28] No space left on device); training continues" in notes
    assert "W&B lacks 6 points of this run, which are in `metrics.jsonl`" in notes


def test_without_a_login_it_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE")
    tracker = Tracker(WandbService(None), print)
    with pytest.raises(UsageError, match="there is no login to W&B; set WANDB_API_KEY or run `wandb login`, or"):
        tracker.start(run_info(tmp_path))
    tracker.close()
    assert core_processes() == []


def test_a_server_that_is_away_is_refused_in_time(tmp_path, monkeypatch):
    monkeypatch.setattr(wandb_room, "_START_SECONDS", 2.0)
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    tracker = Tracker(WandbService(None), print)
    with pytest.raises(TrainerError, match="W&B cannot be used"):
        tracker.start(run_info(tmp_path))
    tracker.close()
    assert core_processes() == []


def test_a_missing_package_is_refused_with_its_installation(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match=r'pip install "recipe-trainer\[wandb\]"'):
        WandbService(None)
