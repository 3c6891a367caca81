"""The verb: exit codes for given findings, and one real examination of this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.metadata import version

import pytest
import torch

from tests.helpers.processes import run
from trainer.base.errors import ExitCode
from trainer.cli import main
from trainer.recipe.schema import Recipe
from trainer.tools.doctor import examining
from trainer.tools.doctor.finding import Result, Status
from trainer.tools.doctor.table import CHECKS


@pytest.fixture
def finds(monkeypatch: pytest.MonkeyPatch) -> Callable[[Status], list[tuple[str | None, int | None, bool]]]:
    """Puts one finding of a status in the place of a real look; returns what the verb asks for."""
    asked: list[tuple[str | None, int | None, bool]] = []

    def put(status: Status) -> list[tuple[str | None, int | None, bool]]:
        def look(recipe: Recipe | None, processes: int | None, deep: bool) -> list[Result]:
            asked.append((recipe.name if recipe else None, processes, deep))
            return [Result("cores", "system", status, "2 of 2", None if status == "ok" else "buy more")]

        monkeypatch.setattr(examining, "examine_this_machine", look)
        return asked

    return put


@pytest.mark.parametrize(
    ("status", "code"), [("ok", ExitCode.DONE), ("warning", ExitCode.DONE), ("problem", ExitCode.FAILED)]
)
def test_only_a_problem_is_a_failure(finds, capsys: pytest.CaptureFixture[str], status: Status, code: ExitCode):
    finds(status)
    assert main(["doctor"]) == code
    assert f"{status:<7}  cores  2 of 2" in capsys.readouterr().out
    assert main(["doctor", "--json"]) == code
    assert json.loads(capsys.readouterr().out)["checks"][0]["status"] == status


def test_a_recipe_is_resolved_first(finds, capsys: pytest.CaptureFixture[str]):
    asked = finds("ok")
    assert main(["doctor", "bert_sample", "name=mine", "--processes", "2", "--deep"]) == ExitCode.DONE
    assert main(["doctor"]) == ExitCode.DONE
    assert asked == [("mine", 2, True), (None, None, False)]
    assert main(["doctor", "bert_sample", "precision=fp7"]) == ExitCode.USER
    assert "`precision` must be" in capsys.readouterr().err


@pytest.mark.slow
def test_this_machine_has_no_problem():
    """A real run: imports torch and deepspeed, connects two processes, downloads nothing."""
    done = run([sys.executable, "-m", "trainer", "doctor", "bert_sample", "--json"], 120)
    answer = json.loads(done.stdout)
    assert [check["value"] for check in answer["checks"] if check["status"] == "problem"] == []
    assert done.returncode == ExitCode.DONE
    assert [check["name"] for check in answer["checks"]] == [check.name for check in CHECKS if not check.deep]
    found = {check["name"]: check["value"] for check in answer["checks"]}
    assert found["torch"].startswith(torch.__version__)
    assert found["deepspeed"] == version("deepspeed")
    assert found["gloo"].startswith("two processes connected on ")
    assert found["recipe"].startswith("bert_sample: ddp, ")
