"""The campaign: its instrument fails the right call, its comparison sees a difference, and a sample of cases passes."""

from __future__ import annotations

import errno
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import plan
from tests.chaos.__main__ import Share
from tests.chaos.campaign import Result, different
from tests.chaos.cases import Tape, aim, draw
from tests.chaos.plan import Call, Target
from tests.checkpoint.samples import save
from tests.helpers import processes
from trainer.checkpoint.format import share_name
from trainer.checkpoint.store import CheckpointStore

# Two files with two writes each, a folder, a rename and a removal; a child then writes.
PROGRAM = """
import ctypes, os, sys
plan, folder = sys.argv[1:]
assert ctypes.CDLL(None).chaos_arm(plan.encode()) == 0
def put(name):
    file = os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT)
    for text in (b"first ", b"second"):
        os.write(file, text)
    os.fsync(file)
def try_(action, *arguments):
    try:
        action(*arguments)
    except OSError as error:
        print(error.errno, *(os.path.basename(str(one)) for one in arguments))
for name in ("a", "b"):
    try_(put, name)
try_(os.mkdir, f"{folder}/c")
try_(os.rename, f"{folder}/a", f"{folder}/d")
if os.fork() == 0:
    try_(put, "e")
    os._exit(0)
os.wait()
print("end")
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if sys.platform != "linux" or shutil.which("gcc") is None:
        pytest.skip("needs Linux and gcc")
    return plan.library(tmp_path_factory.mktemp("library"))


def run(library: Path, folder: Path, **values: Any) -> subprocess.CompletedProcess[str]:
    file, place = folder / "plan", folder / "files"
    place.mkdir()
    names = {name: f"{place}/".encode() for name in ("root", "place", "disk")}
    plan.write(file, **names, **{"rank": -1, **values})
    return processes.run([sys.executable, "-c", PROGRAM, file, place], 60, LD_PRELOAD=str(library))


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (folder / "files").iterdir() if path.is_file()}


WHOLE = "first second"


@pytest.mark.parametrize(
    ("values", "said", "left"),
    [
        ({"calls": Call.WRITES, "nth": 3}, "28 b\nend\n", {"d": WHOLE, "b": "", "e": WHOLE}),
        (
            {"calls": Call.WRITES, "nth": 3, "lasting": Call.OPENS | Call.MAKES},
            "28 b\n28 c\n28 e\nend\n",
            {"d": WHOLE, "b": ""},
        ),
        ({"calls": Call.SYNCS, "nth": 1, "depth": 1}, "28 e\nend\n", {"d": WHOLE, "b": WHOLE, "e": WHOLE}),
        ({"calls": Call.RENAMES, "nth": 1}, "28 a d\nend\n", {"a": WHOLE, "b": WHOLE, "e": WHOLE}),
        ({"calls": Call.OPENS, "nth": 2}, "28 b\nend\n", {"d": WHOLE, "e": WHOLE}),
        ({"calls": Call.REMOVES, "nth": 1}, "end\n", {"d": WHOLE, "b": WHOLE, "e": WHOLE}),
    ],
    ids=["once", "lasting", "in a child", "rename", "open", "not reached"],
)  # fmt: skip
def test_the_call_of_the_plan_fails(library, tmp_path, values, said, left):
    ended = run(library, tmp_path, error=errno.ENOSPC, **values)
    assert (ended.stdout, ended.stderr) == (said, "")
    assert contents(tmp_path) == left
    assert plan.read(tmp_path / "plan").fired == (said != "end\n")


def test_a_kill_leaves_half_of_a_write(library, tmp_path):
    ended = run(library, tmp_path, calls=Call.WRITES, nth=4)
    assert ended.returncode == -signal.SIGKILL
    assert contents(tmp_path) == {"a": WHOLE, "b": "first sec"}


def test_a_child_kills_the_launcher(library, tmp_path):
    ended = run(library, tmp_path, calls=Call.WRITES, nth=1, depth=1, target=Target.LAUNCHER)
    assert ended.returncode == -signal.SIGKILL
    assert len(plan.read(tmp_path / "plan").processes) == 2


def test_calls_are_recorded_and_a_case_is_a_function_of_seed_and_number(library, tmp_path):
    run(library, tmp_path, records=1)
    (tmp_path / "moments").write_text(json.dumps([1, 1, "in step N"]) + "\n")
    tape = Tape.read(tmp_path / "plan", tmp_path / "moments")
    assert [(depth, call) for depth, _, call, path in tape.calls if path == "e"] == [
        (1, Call.OPENS), (1, Call.WRITES), (1, Call.WRITES), (1, Call.SYNCS),
    ]  # fmt: skip
    cases = [draw(3, number) for number in range(40)]
    for case in cases:
        aim(case, 3, tape)
    again = draw(3, 7)
    aim(again, 3, tape)
    assert again == cases[7]
    assert len({case.fault for case in cases}) > 20
    assert {case.kind for case in cases} == {"kill at a moment", "kill at a call", "error", "damage"}


def write_results(folder: Path) -> Path:
    """Write the results of a run that `different` compares."""
    step = {"step": 1, "epoch": 1.0, "loss": 0.5, "grad_norm": 1.0, "learning_rate": 0.1, "samples": 8}
    step |= {"step_seconds": 1.0, "samples_per_second": 1.0, "peak_memory_bytes": 1}
    lines = [{"run": {"resumed_from": None}}, step, {"step": 1, "eval": {"loss": 0.25}}]
    files = {
        "run/metrics.jsonl": "".join(f"{json.dumps(line)}\n" for line in lines),
        "run/model/model.safetensors": "weights",
        "run/best/model.safetensors": "weights",
        "mirror/model/model.safetensors": "weights",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for place in ("run", "mirror"):
        store = CheckpointStore(folder / place, keep=1)
        store.open()
        save(store, 1)
    return folder


@pytest.mark.parametrize(
    ("file", "old", "new", "told"),
    [
        ("run/model/model.safetensors", "weights", "weighty", "model differs: model.safetensors"),
        ("mirror/model/model.safetensors", "weights", "weighty", "the copy of the model differs: model.safetensors"),
        ("run/metrics.jsonl", "0.5", "0.50000001", "the steps of metrics.jsonl differ"),
        ("run/metrics.jsonl", "0.25", "0.26", "the evaluations of metrics.jsonl differ"),
        ("run/.saving-model", "", "x", "run/.saving-model is left"),
        ("memory/rank/state.safetensors", "", "x", "memory/rank/state.safetensors is left"),
    ],
)
def test_a_difference_is_reported(tmp_path, file, old, new, told):
    own, whole = (write_results(tmp_path / name) for name in ("own", "whole"))
    assert different(own, whole) == []
    path = own / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(path.read_text().replace(old, new) if old else new)
    assert different(own, whole) == [told]


def test_another_checkpoint_is_reported(tmp_path):
    own, whole = (write_results(tmp_path / name) for name in ("own", "whole"))
    save(CheckpointStore(own / "mirror", keep=1), 2)
    assert different(own, whole) == ["the copy of the checkpoint differs in its facts and tensors"]
    (own / "run" / "checkpoints" / "step-00000001" / share_name(0, 1)).write_bytes(b"")
    assert "the checkpoint is damaged: " in different(own, whole)[0]


def test_several_processes_share_a_report(tmp_path, monkeypatch):
    report = tmp_path / "report.jsonl"
    share, other = Share(report), Share(report)
    numbers, others = share.take(range(4)), other.take(range(4))
    assert [next(numbers), next(others), next(numbers)] == [0, 1, 2]
    share.add(result := Result(0, "ddp", "error", False, 0, "a fault", codes=[1, 0]))
    assert other.results() == {0: result}
    monkeypatch.setattr("psutil.pid_exists", lambda pid: False)  # both were killed, and number 0 is done
    assert list(Share(report).take(range(4))) == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sample_of_the_campaign(library, tmp_path):
    words = ["--seed", "1", "--cases", "2", "--feature", "ddp", "--folder", tmp_path]
    ended = processes.run([sys.executable, "-m", "tests.chaos", *words], 800)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "\n2 cases, 2 injections, 0 failed\n" in ended.stdout
