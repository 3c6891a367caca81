"""No run says anything to anybody but the user's own tracking server: a whole one, with every tracker, is watched."""

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.features.trackers.tracked import offline_runs
from tests.helpers import processes
from tests.helpers.tiny_run import write_tiny_run
from tests.helpers.turns import once
from trainer.features.csv_metrics.csv_files import EVALUATION_FILE_NAME, TRAINING_FILE_NAME
from trainer.observe.metrics_file import METRICS_FILE_NAME
from trainer.ranks.environment import forbid_telemetry, no_telemetry
from trainer.tools.run_metrics import Metrics, read_metrics

IN_NO_NETWORK = ["unshare", "--map-root-user", "--net"]
OPPOSITES = {"true": "false", "false": "true", "1": "0", "0": "1"}
# Where one of these marks is set, MLflow reports nothing anyway, and the test would prove nothing.
MARKS_OF_TESTS = ("CI", "PYTEST_CURRENT_TEST", "GITHUB_ACTIONS", "GITLAB_CI", "BUILDKITE", "JENKINS_URL", "TF_BUILD")


def no_network() -> list[str]:
    """What starts a program in a network namespace of its own; empty where that is not permitted."""
    try:
        permitted = subprocess.run([*IN_NO_NETWORK, "true"], capture_output=True, timeout=60).returncode == 0
    except FileNotFoundError:
        permitted = False
    return IN_NO_NETWORK if permitted else []


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """The folder of a run that was stopped and gone on with, and the report on what it asked of the network."""
    pytest.importorskip("wandb")
    pytest.importorskip("mlflow")
    return once("telemetry: watched runs", lambda: watch(tmp_path_factory.mktemp("watched")))


def watch(folder: Path) -> tuple[Path, dict[str, Any]]:
    recipe = write_tiny_run(folder, logging={"every": "1 step", "to": ["csv", "wandb", "mlflow"], "project": "tiny"})
    words = ["run", str(recipe), "--processes", "1"]
    variables = processes.environment(WANDB_MODE="offline", HOME=str(folder / "home"))
    for name in list(variables):
        if name in MARKS_OF_TESTS or (name.startswith(("MLFLOW_", "WANDB_")) and name != "WANDB_MODE"):
            del variables[name]
    variables |= {name: OPPOSITES[value] for name, value in no_telemetry().items()}
    (folder / "elsewhere").mkdir()
    program = processes.ROOT / "tests" / "features" / "trackers" / "watched_run.py"
    runs = [json.dumps([*words, "training.stop_at_step=5"]), json.dumps(words)]
    prefix = no_network()
    done = subprocess.run(
        [*prefix, sys.executable, str(program), str(folder / "report.json"), *runs],
        cwd=folder / "elsewhere",
        env=variables,
        timeout=500,
        capture_output=True,
        text=True,
    )
    print(done.stdout, done.stderr, sep="\n")
    assert done.returncode == 0
    home = variables["HOME"]  # beside runs of other tests
    left = [p for p in psutil.process_iter(["name", "environ"]) if (p.info["environ"] or {}).get("HOME") == home]
    assert left == [], "wandb-core is left behind"
    report = json.loads((folder / "report.json").read_text())
    return folder, report | {"counted": bool(prefix)}


@pytest.mark.slow
def test_a_run_asks_nothing_of_the_network(watched):
    folder, report = watched
    assert report["codes"] == [75, 0]
    assert report["asked"] == []
    assert report["silenced"] == dict.fromkeys(("huggingface_hub", "datasets", "mlflow", "wandb"), True)
    assert list((folder / "elsewhere").iterdir()) == []


@pytest.mark.slow
def test_the_kernel_saw_no_attempt_of_any_of_its_processes(watched):
    _, report = watched
    if not report["counted"]:
        pytest.skip("no network namespace is permitted here")
    assert {name: number for name, number in report["counters"].items() if number} == {}
    assert len(report["counters"]) >= 5


def expected(metrics: Metrics, name: str) -> dict[int, float]:
    return {record.step: getattr(record, name) for record in metrics.steps}


@pytest.mark.slow
def test_every_tracker_has_the_numbers_of_metrics_jsonl_over_both_parts(watched):
    from mlflow.tracking import MlflowClient

    run = watched[0] / "run"
    metrics = read_metrics(run / METRICS_FILE_NAME)
    assert len(metrics.steps) == 8
    accuracies = {record.step: record.metrics["accuracy"] for record in metrics.evaluations}
    ids = json.loads((run / "tracking.json").read_text())

    store = MlflowClient(f"sqlite:///{run / 'mlflow.db'}")
    first, second = offline_runs(run)
    assert first.run.run_id == second.run.run_id == ids["wandb"]
    history = first.history | second.history
    for name in ("loss", "grad_norm", "learning_rate", "samples", "tokens", "step_seconds"):
        numbers = expected(metrics, name)
        assert {step: row[f"train/{name}"] for step, row in history.items()} == numbers
        assert {m.step: m.value for m in store.get_metric_history(ids["mlflow"], f"train/{name}")} == numbers
        assert _column(run / TRAINING_FILE_NAME, name) == numbers
    held = {m.step: m.value for m in store.get_metric_history(ids["mlflow"], "eval/accuracy")}
    in_history = {step: row["eval/accuracy"] for step, row in history.items() if "eval/accuracy" in row}
    assert held == in_history == _column(run / EVALUATION_FILE_NAME, "accuracy") == accuracies
    assert (first.exit_code, second.exit_code) == (75, 0)
    assert store.get_run(ids["mlflow"]).info.status == "FINISHED"


def _column(file: Path, name: str) -> dict[int, float]:
    with file.open(newline="") as rows:
        return {int(row["step"]): float(row[name]) for row in csv.DictReader(rows)}


def test_a_setting_of_the_user_does_not_allow_telemetry():
    environ = dict.fromkeys(no_telemetry(), "allow")
    forbid_telemetry(environ)
    assert environ == no_telemetry()
