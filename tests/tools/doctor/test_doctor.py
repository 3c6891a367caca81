"""The verb: exit codes for given findings, and one real examination of this machine."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from tests.helpers.processes import run
from trainer.base.errors import ExitCode
from trainer.cli import main
from trainer.tools.doctor import examining
from trainer.tools.doctor.finding import Result, Status
from trainer.tools.doctor.table import CHECKS


@pytest.mark.parametrize(
    ("status", "code"), [("ok", ExitCode.DONE), ("warning", ExitCode.DONE), ("problem", ExitCode.FAILED)]
)
def test_only_a_problem_is_a_failure(monkeypatch, capsys, status: Status, code: ExitCode):
    result = Result("runs", "folders", status, "2 GiB free", None if status == "ok" else "buy more")
    monkeypatch.setattr(examining, "examine_this_machine", lambda: [result])
    assert main(["doctor"]) == code
    assert f"{status:<7}  runs  2 GiB free" in capsys.readouterr().out
    assert main(["doctor", "--json"]) == code
    assert json.loads(capsys.readouterr().out)["checks"][0]["status"] == status


@pytest.mark.slow
def test_this_machine_has_no_problem():
    """A real run: imports torch, connects two processes, downloads nothing."""
    done = run([sys.executable, "-m", "trainer", "doctor", "--json"], 120)
    answer = json.loads(done.stdout)
    assert [check["value"] for check in answer["checks"] if check["status"] == "problem"] == []
    assert done.returncode == ExitCode.DONE
    assert [check["name"] for check in answer["checks"]] == [check.name for check in CHECKS]
    found = {check["name"]: check["value"] for check in answer["checks"]}
    assert found["torch"].startswith(torch.__version__)
    assert found["gloo"].startswith("two processes connected on ")
