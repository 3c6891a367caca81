"""MLflow for real, with its store in a file: what was written is read back by its own client."""

import json
import math
import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.features.trackers.test_tracking import wait_for
from tests.observe.samples import end_record, run_info, step_record
from trainer.base.errors import TrainerError, UsageError
from trainer.features.trackers.mlflow import MLflowService
from trainer.features.trackers.tracking import IDS_FILE_NAME, Tracker
from trainer.observe.records import EvaluationRecord

# Its import takes a second, so each worker would wait for it at the collection.
pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(not (find_spec("mlflow") and find_spec("sqlalchemy")), reason="needs mlflow and sqlalchemy"),
]


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory) -> Path:
    """Its tables, made once: that takes seconds."""
    file = tmp_path_factory.mktemp("store") / "mlflow.db"
    client(file.parent).search_experiments()
    return file


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path, empty_store) -> Path:
    """A run's folder with an empty store, in another place than where the test works."""
    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        monkeypatch.delenv(name)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "run").mkdir()
    shutil.copy(empty_store, tmp_path / "run" / "mlflow.db")
    return tmp_path / "run"


def started(folder: Path, resumed_from: int | None = None, **changes) -> tuple[Tracker, list[str]]:
    notes: list[str] = []
    tracker = Tracker(MLflowService("a project"), notes.append, retry_seconds=0.1)
    tracker.start(run_info(folder, resumed_from=resumed_from, **changes))
    return tracker, notes


def write(folder: Path, steps: range, resumed_from: int | None = None, loss: float = 1.0, **end) -> None:
    tracker, _ = started(folder, resumed_from)
    for step in steps:
        tracker.step(step_record(step, loss=loss / step))
        if step % 2 == 0:
            tracker.evaluation(EvaluationRecord(step, {"accuracy": step / 7, "loss": math.nan}))
    tracker.end(end_record(folder, **end))
    tracker.close()


def client(folder: Path) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")


def only_run(folder: Path) -> Any:
    store = client(folder)
    (run,) = store.search_runs([experiment.experiment_id for experiment in store.search_experiments()])
    return run


def points(folder: Path, name: str) -> list[tuple[int, float]]:
    history = client(folder).get_metric_history(only_run(folder).info.run_id, name)
    return [(metric.step, metric.value) for metric in history]


def test_the_run_reads_back(folder):
    write(folder, range(1, 5))
    run = only_run(folder)
    assert (run.info.run_name, run.info.status) == ("small", "FINISHED")
    assert client(folder).get_experiment(run.info.experiment_id).name == "a project"
    assert points(folder, "train/loss") == [(step, 1 / step) for step in range(1, 5)]
    assert points(folder, "eval/accuracy") == [(2, 2 / 7), (4, 4 / 7)]
    assert all(math.isnan(value) for _, value in points(folder, "eval/loss"))
    assert run.data.metrics["best/accuracy"] == 0.8125
    assert run.data.metrics["best/step"] == 230
    assert run.data.params["training.epochs"] == "3"
    assert run.data.params["run.layout"] == "dp_replicate 2"
    assert run.data.params["run.versions.torch"] == "2.13.0"


def test_the_files_lie_in_the_run_and_nothing_of_the_machine_is_recorded(folder):
    write(folder, range(1, 3))
    assert list((folder.parent / "elsewhere").iterdir()) == []
    assert {path.name for path in folder.iterdir()} == {"mlflow.db", IDS_FILE_NAME}
    run = only_run(folder)
    assert set(run.data.tags) == {"mlflow.runName"}, "no user, script or git commit"
    assert run.info.user_id in ("", "unknown")


def test_a_stopped_run_goes_on_as_the_same_run_and_no_step_is_there_twice(folder):
    write(folder, range(1, 6), outcome="stopped", exit_code=75)
    assert only_run(folder).info.status == "SCHEDULED"
    tracker, _ = started(folder, 3)
    assert only_run(folder).info.status == "RUNNING"
    tracker.end(end_record(folder, outcome="failed", exit_code=1))
    assert only_run(folder).info.status == "FAILED"
    write(folder, range(4, 8), resumed_from=3)
    assert only_run(folder).info.status == "FINISHED"
    assert points(folder, "train/loss") == [(step, 1 / step) for step in range(1, 8)]
    assert points(folder, "eval/accuracy") == [(2, 2 / 7), (4, 4 / 7), (6, 6 / 7)]


def test_a_store_that_returns_gets_the_missing_records(folder):
    tracker, notes = started(folder)
    store = folder / "mlflow.db"
    store.rename(folder / "aside")
    tracker.step(step_record(1, loss=0.5))
    wait_for(lambda: "complaint" in tracker._notes.kinds)
    store.unlink(missing_ok=True)  # an empty one, by the library
    (folder / "aside").rename(store)
    wait_for(lambda: not tracker._waiting)
    tracker.end(end_record(folder))
    assert points(folder, "train/loss") == [(1, 0.5)]
    assert [note.partition(" (")[0] for note in notes[1:]] == ["MLflow cannot be written"]


def test_a_server_that_is_away_is_refused_without_its_password(folder, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(TrainerError, match="MLflow cannot be used") as raised:
        started(folder)
    assert "secret" not in str(raised.value)
    assert str(raised.value).endswith("or remove it from `logging.to`")


def test_a_run_that_another_server_does_not_know_is_refused(folder, empty_store, monkeypatch):
    write(folder, range(1, 3))
    other = folder.parent / "other.db"
    shutil.copy(empty_store, other)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{other}")
    with pytest.raises(UsageError, match=r"tracking\.json.* has none of that id; set MLFLOW_TRACKING_URI as it was"):
        started(folder, 2)


def test_the_variables_of_mlflow_name_place_and_experiment(folder, empty_store, monkeypatch):
    other = folder.parent / "other"
    other.mkdir()
    shutil.copy(empty_store, other / "mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{other / 'mlflow.db'}")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "theirs")
    tracker = Tracker(MLflowService(None), print)
    tracker.start(run_info(folder))
    tracker.end(end_record(folder))
    experiment = client(other).get_experiment(only_run(other).info.experiment_id)
    assert experiment.name == "theirs"


def test_a_recipe_of_any_size_and_keys_is_taken(folder):
    recipe = {"model": {"config": {f"key {n} (of many)": "x" * 7000 for n in range(120)}}, "list": ["a", 1]}
    tracker, _ = started(folder, recipe=recipe)
    tracker.end(end_record(folder))
    params = only_run(folder).data.params
    assert params["list"] == json.dumps(["a", 1])
    assert len([name for name in params if name.startswith("model.config.key")]) == 120


def test_a_missing_package_is_refused_with_its_installation(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    monkeypatch.delitem(sys.modules, "mlflow.tracking")
    with pytest.raises(UsageError, match=r'pip install "recipe-trainer\[mlflow\]"'):
        MLflowService(None)
