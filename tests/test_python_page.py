"""The code of `docs/python.md` runs as it stands."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import processes, warm
from tests.helpers.processes import ROOT, environment, finish
from tests.helpers.warm import WarmProcess

PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
SCRIPTS = dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the scripts of the page, which is the current one."""
    for name, text in SCRIPTS.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    return tmp_path


def ended(process: subprocess.Popen[str] | WarmProcess) -> str:
    """What a program writes, which must end well."""
    found = finish(process, 240)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def run_script(words: list[str]) -> int:
    """Run a script of the page in its folder, as `python` does."""
    os.chdir(words[0])
    sys.path.insert(0, words[0])
    runpy.run_path(words[1], run_name="__main__")
    return 0


def script(folder: Path, name: str) -> str:
    return ended(warm.start([folder, name], program="tests.test_python_page:run_script"))


def test_every_block_is_run_here():
    names = [
        "train.py",
        "fits.py",
        "journey.py",
        "errors.py",
        "two_ranks.py",
        "watch.py",
        "train_watched.py",
        "own_loop.py",
    ]
    names += ["smooth.py", "train_smooth.py"]
    assert list(SCRIPTS) == names
    assert PAGE.count("```python") == len(SCRIPTS)


def test_a_plan(scripts: Path, capsys: pytest.CaptureFixture[str]):
    runpy.run_path("fits.py")
    fits, needed, *_, seconds = capsys.readouterr().out.splitlines()[-1].split()
    assert (fits, int(needed) > 2**30, 0 < float(seconds) < 1) == ("True", True, True)


def test_a_run(scripts: Path, capsys: pytest.CaptureFixture[str]):
    runpy.run_path("train.py")
    outcome, accuracy, model = capsys.readouterr().out.splitlines()[-1].split()
    assert outcome == "finished"
    assert 0 < float(accuracy) < 1
    assert Path(model) == scripts / "runs" / "python" / "model"
    assert (Path(model) / "model.safetensors").exists()


def test_errors(scripts: Path, capsys: pytest.CaptureFixture[str]):
    runpy.run_path("errors.py")
    first, second = capsys.readouterr().out.splitlines()
    assert "did you mean `training.epochs`" in first + second
    assert "`precision` must be one of" in first + second


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_the_journey(scripts: Path, capsys: pytest.CaptureFixture[str]):
    assert len(SCRIPTS["journey.py"].splitlines()) <= 25
    runpy.run_path("journey.py")
    shown = capsys.readouterr().out
    assert shown.startswith("[] True\n['truncated']\n")
    found = re.search(r"^\['optimizer.learning_rate=1e-[34]'\] \[None, \{'loss': (\S+), ", shown, re.MULTILINE)
    assert found is not None, shown
    assert float(found[1]) < 1e-5
    assert re.search(r"^0\.\d+$", shown, re.MULTILINE), shown
    assert re.search(r"^\w+ \{'\w+': 0\.\d+, '\w+': 0\.\d+\}$", shown, re.MULTILINE), shown
    assert Path(shown.splitlines()[-1]) == scripts / "exported"
    assert (scripts / "exported" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_two_ranks(scripts: Path, capsys: pytest.CaptureFixture[str]):
    runpy.run_path("two_ranks.py")
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1] == "finished 1", shown
    assert "2 ranks on cpu" in shown, "the output of the ranks is shown, too"


@pytest.mark.slow
def test_a_callback_stops_two_ranks_and_starts_again(scripts: Path):
    first, second = (script(scripts, "train_watched.py").splitlines() for _ in range(2))
    assert ("from step 0" in first, first[-1]) == (True, "stopped 1 []")
    assert ("from step 1" in second, second[-1]) == (True, "stopped 2 [2]")
    assert "the callback `Target` asks to stop" in second


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_an_own_loop_on_two_ranks(scripts: Path):
    assert len(SCRIPTS["own_loop.py"].splitlines()) <= 60
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "own_loop.py"]
    shown = ended(processes.start([sys.executable, *torchrun], scripts))
    assert re.findall(r"^step (\d): loss \d\.\d+, gradient norm \d", shown, re.MULTILINE) == list("123456")
    assert len(re.findall(r"^accuracy 0\.\d+", shown, re.MULTILINE)) == 2
    assert (scripts / "runs" / "own_loop" / "model" / "model.safetensors").exists()


@pytest.mark.slow
def test_a_registered_task_and_metric_on_two_ranks(scripts: Path):
    shown = script(scripts, "train_smooth.py")
    assert re.search(r"BestMetric\(name='error_rate', value=0\.\d+, step=4, loss=\d\.\d+\)", shown), shown
