"""Progress in the status of a TrainJob: the payload, and servers, files and tokens that fail."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest

from tests.features.kubeflow.status_server import PATH, TOKEN, StatusServer, certificate
from tests.helpers import warm
from tests.helpers.processes import ROOT, finish
from tests.observe.samples import end_record, run_info, step_record
from trainer.features.kubeflow import progress, server
from trainer.observe.records import EvaluationRecord, LoggedRecord

SCHEMA = json.loads((ROOT / "tests/tools/schemas/TrainerStatus.json").read_text())
SECRETS = (TOKEN, "hunter2")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[StatusServer]:
    one = StatusServer(tmp_path)
    with one.serving():
        yield one


def observer(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch, rank: int = 0):
    """Return the observer of a rank in a pod with these variables, without pauses, and the notes that it shows."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(progress, "INTERVAL_SECONDS", 0.0)
    notes: list[str] = []
    made = progress.observer(SimpleNamespace(environment=SimpleNamespace(rank=rank), note=notes.append))
    if made is not None:
        made._interval_seconds = made._retry_seconds = 0.0
    return made, notes


def checked(one: StatusServer) -> list[dict]:
    for status in one.statuses:
        jsonschema.validate(status, SCHEMA, format_checker=jsonschema.FormatChecker())
    return one.statuses


def test_a_run_is_followed_from_its_start_to_its_end(cluster, monkeypatch, tmp_path):
    made, notes = observer(cluster.variables, monkeypatch)
    made.start(run_info(tmp_path, total_steps=200))
    cluster.wait(1)
    made.step(step_record(50, loss=0.25, learning_rate=5e-5))
    cluster.wait(2)
    made.evaluation(EvaluationRecord(50, {"accuracy": 0.5}))
    made.logged(LoggedRecord(50, {"größe": 3}))
    made.end(end_record(tmp_path, step=200))
    first, second, *_, last = checked(cluster)
    assert (first["progressPercentage"], second["progressPercentage"], last["progressPercentage"]) == (0, 25, 100)
    assert "estimatedRemainingSeconds" not in first
    assert last["estimatedRemainingSeconds"] == 0
    metrics = {metric["name"]: metric["value"] for metric in last["metrics"]}
    assert {
        "train/loss": "0.25",
        "train/samples": "1600",
        "eval/accuracy": "0.5",
        "größe": "3",
    }.items() <= metrics.items()
    path, headers, _ = cluster.requests[-1]
    assert (path, headers["Authorization"]) == (PATH, f"Bearer {TOKEN}")
    assert notes == []


def test_the_remaining_time_counts_the_steps_of_this_start(cluster, monkeypatch, tmp_path):
    made, _ = observer(cluster.variables, monkeypatch)
    now = 1000.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    made.start(run_info(tmp_path, total_steps=100, resumed_from=60))
    cluster.wait(1)
    now += 20
    made.step(step_record(70))
    cluster.wait(2)
    assert [status["progressPercentage"] for status in checked(cluster)] == [60, 70]
    assert cluster.statuses[1]["estimatedRemainingSeconds"] == 60
    made.end(end_record(tmp_path, outcome="stopped", exit_code=75, step=70))
    assert checked(cluster)[-1]["progressPercentage"] == 70
    assert "estimatedRemainingSeconds" not in cluster.statuses[-1]


@pytest.mark.slow
def test_transformers_sends_the_same_kind_of_request(cluster, monkeypatch, tmp_path):
    from transformers.integrations import KubeflowCallback

    made, _ = observer(cluster.variables, monkeypatch)
    theirs = KubeflowCallback()
    theirs._update_status(progress_percent=25, estimated_time_remaining=60, metrics={"train/loss": 0.25}, force=True)
    made.start(run_info(tmp_path, total_steps=200))
    cluster.wait(2)
    made.step(step_record(50))
    cluster.wait(3)
    made.end(end_record(tmp_path, step=50, outcome="failed", exit_code=1))
    (path, headers, body), ours = cluster.requests[0], cluster.requests[2]
    assert ours[0] == path
    assert all(ours[1][name] == headers[name] for name in ("Authorization", "Content-Type"))
    reported = cluster.statuses[2]
    assert reported.keys() == body["trainerStatus"].keys()
    types = {name: type(value) for name, value in body["trainerStatus"].items()}
    assert types == {name: type(value) for name, value in reported.items()}
    assert reported["metrics"][0].keys() == body["trainerStatus"]["metrics"][0].keys()


def redirected(request: BaseHTTPRequestHandler) -> None:
    request.send_response(307)
    request.send_header("Location", f"https://{request.headers['Host']}/stolen")
    request.end_headers()


def failing(request: BaseHTTPRequestHandler) -> None:
    request.send_response(500, f"hunter2 {request.headers['Authorization']}")
    request.end_headers()
    request.wfile.write(TOKEN.encode())


def huge(request: BaseHTTPRequestHandler) -> None:
    request.send_response(200)
    request.send_header("Content-Length", str(1 << 40))
    request.end_headers()
    while True:
        request.wfile.write(bytes(1 << 20))


def babbling(request: BaseHTTPRequestHandler) -> None:
    request.wfile.write(f"hunter2 {TOKEN}\r\n\r\n".encode() * 10000)


ANSWERS = {
    "an error": (failing, "answered 500 (Internal Server Error)"),
    "a redirect": (redirected, "answered 307 (Temporary Redirect)"),
    "no HTTP": (babbling, "no answer from 127.0.0.1:"),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_an_answer_that_is_no_success_is_one_note(case, cluster, monkeypatch, tmp_path):
    cluster.answer, reason = ANSWERS[case]
    made, notes = observer(cluster.variables, monkeypatch)
    made.start(run_info(tmp_path))
    for step in range(1, 4):
        made.step(step_record(step))
        cluster.wait(step)
    made.end(end_record(tmp_path, step=3))
    (note,) = notes
    assert reason in note
    assert "training continues" in note
    assert not any(secret in note for secret in SECRETS)
    assert {path for path, _, _ in cluster.requests} == {PATH}, "the token went to another address"


def test_an_endless_answer_is_not_read(cluster, monkeypatch, tmp_path):
    cluster.answer = huge
    made, notes = observer(cluster.variables, monkeypatch)
    made.start(run_info(tmp_path))
    cluster.wait(1)
    begin = time.monotonic()
    made.end(end_record(tmp_path))
    assert time.monotonic() - begin < 4
    assert notes == []


def test_a_server_that_hangs_delays_neither_a_step_nor_the_end_for_long(cluster, monkeypatch, tmp_path):
    monkeypatch.setattr(progress, "END_SECONDS", 0.3)
    freed = threading.Event()
    cluster.answer = lambda request: freed.wait(20)
    made, notes = observer(cluster.variables, monkeypatch)
    begin = time.monotonic()
    made.start(run_info(tmp_path))
    cluster.wait(1)
    for step in range(1, 1001):
        made.step(step_record(step))
        made.doing(step, "")
    assert time.monotonic() - begin < 2
    made.end(end_record(tmp_path))
    assert time.monotonic() - begin < 3
    freed.set()
    assert len(notes) == 1
    assert "the server does not answer" in notes[0]


def test_a_silent_server_times_out(cluster, monkeypatch):
    monkeypatch.setattr(server, "TIMEOUT_SECONDS", 0.2)
    freed = threading.Event()
    cluster.answer = lambda request: freed.wait(20)
    made, _ = observer(cluster.variables, monkeypatch)
    with pytest.raises(server.StatusError, match=r"no answer from 127\.0\.0\.1:\d+: TimeoutError"):
        made._server.write({})
    freed.set()


def _missing(variables: dict[str, str], folder: Path) -> None:
    Path(variables[server.TOKEN]).unlink()


def _two_lines(variables: dict[str, str], folder: Path) -> None:
    Path(variables[server.TOKEN]).write_text(f"{TOKEN}\r\nHost: hunter2")


def _binary(variables: dict[str, str], folder: Path) -> None:
    Path(variables[server.TOKEN]).write_bytes(b"\xff\xfehunter2")


def _pipe(variables: dict[str, str], folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    variables[server.TOKEN] = str(folder / "pipe")


def _another_ca(variables: dict[str, str], folder: Path) -> None:
    variables[server.CA] = str(certificate(folder, "another.crt")[0])


def _no_ca(variables: dict[str, str], folder: Path) -> None:
    Path(variables[server.CA]).write_text("hunter2")


def _plain(variables: dict[str, str], folder: Path) -> None:
    variables[server.URL] = variables[server.URL].replace("https", "http")


def _password(variables: dict[str, str], folder: Path) -> None:
    variables[server.URL] = variables[server.URL].replace("127", "user:hunter2@127")


def _nobody(variables: dict[str, str], folder: Path) -> None:
    variables[server.URL] = "https://127.0.0.1:1/status"


def _unset(variables: dict[str, str], folder: Path) -> None:
    variables[server.TOKEN] = variables[server.CA] = ""


DAMAGES = {
    _missing: "cannot be read: FileNotFoundError",
    _two_lines: "must be one word",
    _binary: "it is no text in ASCII",
    _pipe: "must be a file",
    _another_ca: "no answer from 127.0.0.1:",
    _no_ca: "(KUBEFLOW_TRAINER_SERVER_CA_CERT) cannot be used: SSLError",
    _plain: "must be https://HOST:PORT/PATH",
    _password: "must be https://HOST:PORT/PATH",
    _nobody: "no answer from 127.0.0.1:1: ConnectionRefusedError",
    _unset: "the token '' (KUBEFLOW_TRAINER_SERVER_TOKEN)",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda one: one.__name__)
def test_what_a_pod_may_lack_is_one_note_without_secrets(damage, cluster, monkeypatch, tmp_path):
    variables = cluster.variables
    damage(variables, tmp_path)
    made, notes = observer(variables, monkeypatch)
    made.start(run_info(tmp_path))
    made.step(step_record(1))
    made.end(end_record(tmp_path))
    (note,) = notes
    assert DAMAGES[damage] in note, note
    assert not any(secret in note for secret in SECRETS)
    assert cluster.requests == []


def test_a_renewed_token_and_ca_are_read_again(cluster, monkeypatch, tmp_path):
    cluster.token.write_text("expired")
    made, notes = observer(cluster.variables, monkeypatch)
    made.start(run_info(tmp_path))
    cluster.wait(1)
    cluster.token.write_text(f"{TOKEN}\n")
    good = cluster.ca.read_bytes()
    cluster.ca.write_bytes(certificate(tmp_path, "another.crt")[0].read_bytes())
    made.step(step_record(1))
    time.sleep(0.3)
    cluster.ca.write_bytes(good)
    made.end(end_record(tmp_path))
    assert cluster.requests[0][1]["Authorization"] == "Bearer expired"
    assert cluster.requests[-1][1]["Authorization"] == f"Bearer {TOKEN}"
    assert cluster.statuses[-1]["progressPercentage"] == 100
    assert len(notes) == 1


def test_metrics_beyond_the_schema_are_left_out_and_named(cluster, monkeypatch, tmp_path):
    made, notes = observer(cluster.variables, monkeypatch)
    made.start(run_info(tmp_path))
    made.logged(LoggedRecord(1, {"x" * 65: 1.0, **{f"m{number}": float("nan") for number in range(300)}}))
    made.end(end_record(tmp_path))
    assert len(checked(cluster)[-1]["metrics"]) == 256
    (note,) = notes
    assert f"leaves out '{'x' * 65}'" in note


def test_other_ranks_report_nothing(cluster, monkeypatch):
    assert observer(cluster.variables, monkeypatch, rank=1) == (None, [])


@pytest.mark.slow
def test_a_run_reports_by_its_environment_alone(cluster, tmp_path):
    """Two local ranks; rank 0 alone writes."""
    words = ["training.max_steps=2", "logging.every=1 step", "evaluation.every=null", "evaluation.best=null"]
    words += ["evaluation.verify_export=0", f"checkpoint.folder={tmp_path / 'run'}", "--processes", "2"]
    ended = finish(warm.start(["run", str(ROOT / "recipes" / "bert_sample.json"), *words], **cluster.variables))
    assert ended.returncode == 0, ended.stderr
    statuses = checked(cluster)
    assert (statuses[0]["progressPercentage"], statuses[-1]["progressPercentage"]) == (0, 100)
    assert "train/loss" in {metric["name"] for metric in statuses[-1]["metrics"]}
    assert len(statuses) <= 2 + (time.time() - (tmp_path / "run").stat().st_ctime) / progress.INTERVAL_SECONDS
    assert TOKEN not in ended.stdout + ended.stderr
