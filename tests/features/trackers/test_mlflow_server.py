"""Tracking with a real MLflow server, which is killed in the run and comes back.

It needs the program `mlflow` of the whole package; the project installs mlflow-skinny, which has no server. The
variable TEST_MLFLOW names the program of another environment. Without one, the test is skipped.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.observe.samples import end_record, run_info, step_record
from trainer.features.trackers.mlflow import MLflowService
from trainer.features.trackers.tracking import Tracker

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not (find_spec("mlflow") and find_spec("sqlalchemy")), reason="needs mlflow and sqlalchemy"),
]
STEPS_BEFORE, STEPS_WITHOUT, STEPS_AFTER = 3, 40, 3


class Server:
    """A process of `mlflow server`, with its store in a folder."""

    def __init__(self, program: str, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self._port}"
        self._command = [program, "server", "--host", "127.0.0.1", "--port", str(self._port), "--workers", "1"]
        self._command += ["--backend-store-uri", f"sqlite:///{folder / 'store.db'}"]
        self._command += ["--default-artifact-root", str(folder / "artifacts")]
        self._log = folder / "server.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server, and wait until it answers; skip the test if it cannot start."""
        variables = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=variables, start_new_session=True
            )
        if not wait_for(lambda: self._process is None or self._process.poll() is not None or self._answers(), 120):
            self.kill()
            pytest.skip(f"the MLflow server does not answer: {self._last_line()}")
        if self._process.poll() is not None:
            pytest.skip(f"no MLflow server can be started here: {self._last_line()}")

    def _answers(self) -> bool:
        with suppress(OSError), urllib.request.urlopen(f"{self.uri}/health", timeout=2) as answer:
            return bool(answer.status == 200)
        return False

    def _last_line(self) -> str:
        return next(iter(reversed(self._log.read_text(errors="replace").split("\n")[:-1])), "it says nothing")

    def kill(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(30)


def wait_for(condition: Callable[[], object], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


@pytest.fixture
def server(tmp_path) -> Iterator[Server]:
    program = os.environ.get("TEST_MLFLOW") or shutil.which("mlflow")
    if program is None:
        pytest.skip("the program mlflow is not here")
    started = Server(program, tmp_path)
    try:
        started.start()
        yield started
    finally:
        started.kill()


def test_a_killed_server_gets_all_points_when_it_is_back(server, tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    (tmp_path / "run").mkdir()
    notes: list[str] = []
    tracker = Tracker(MLflowService("a project"), notes.append, retry_seconds=0.5)
    tracker.start(run_info(tmp_path / "run"))
    steps = iter(range(1, 1 + STEPS_BEFORE + STEPS_WITHOUT + STEPS_AFTER))

    def train(number: int) -> None:
        for _, step in zip(range(number), steps, strict=False):
            tracker.step(step_record(step, loss=1.0 / step))

    train(STEPS_BEFORE)
    assert wait_for(lambda: not tracker._waiting, 60)
    server.kill()
    train(STEPS_WITHOUT)
    assert wait_for(lambda: "complaint" in tracker._notes.kinds, 60)
    server.start()
    train(STEPS_AFTER)
    assert wait_for(lambda: not tracker._waiting, 60)
    tracker.end(end_record(tmp_path / "run"))
    tracker.close()
    from mlflow.tracking import MlflowClient

    store = MlflowClient(server.uri)
    (run,) = store.search_runs([experiment.experiment_id for experiment in store.search_experiments()])
    history = store.get_metric_history(run.info.run_id, "train/loss")
    assert sorted((metric.step, metric.value) for metric in history) == [
        (step, 1.0 / step) for step in range(1, 1 + STEPS_BEFORE + STEPS_WITHOUT + STEPS_AFTER)
    ]
    assert run.info.status == "FINISHED"
    assert [note for note in notes if "cannot be written" in note], "it is told once"
