from __future__ import annotations

import re
import sys
import threading

import pytest

from tests.helpers.processes import run
from tests.tools.doctor.machines import machine, without_torch
from trainer.tools.doctor.examining import examine
from trainer.tools.doctor.finding import Finding, ok, warning
from trainer.tools.doctor.machine import Machine
from trainer.tools.doctor.table import CHECKS, Check


def test_findings_come_in_the_order_of_the_table_however_long_they_take():
    second_is_done = threading.Event()

    def first(at: Machine) -> Finding:
        assert second_is_done.wait(5)
        return ok("one")

    def second(at: Machine) -> Finding:
        second_is_done.set()
        return warning("two", "mend it")

    found = examine(machine(), checks=[Check("a", "first", first), Check("b", "second", second)])
    assert [(result.group, result.name, result.value, result.remedy) for result in found] == [
        ("a", "first", "one", None),
        ("b", "second", "two", "mend it"),
    ]


def test_a_check_that_fails_is_a_line():
    def fail(at: Machine) -> Finding:
        raise ValueError("not what it thought")

    (found,) = examine(machine(), checks=[Check("a", "b", fail)])
    assert (found.status, found.value) == ("problem", "the check itself failed: ValueError: not what it thought")


def test_a_package_that_is_missing_is_a_line():
    """Before the checks start, only the standard library and typer are imported."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('packaging', 'psutil', 'yaml', 'pydantic', 'torch'), None))\n"
        "from pathlib import Path\n"
        "from trainer.tools.doctor import examining, finding, machine\n"
        "at = machine.Machine({'HF_HUB_OFFLINE': '1'}, None, Path('/nowhere'))\n"
        "checks = [check for check in examining.CHECKS if check.name in ('trainer', 'dependencies', 'gloo')]\n"
        "print(*finding.lines(examining.examine(at, checks=checks), 200), sep='\\n')"
    )
    shown = run([sys.executable, "-c", code], 60).stdout
    assert "not checked: import of psutil halted; None in sys.modules" in shown
    assert re.search(r"dependencies .*not checked: .*packaging", shown)


def test_a_check_that_hangs_is_a_line():
    forever = threading.Event()

    def hang(at: Machine) -> Finding:
        forever.wait()
        return ok("")

    (found,) = examine(machine(), checks=[Check("a", "b", hang, seconds=0.1)])
    forever.set()
    assert (found.status, found.value) == ("problem", "no answer within 0 s")


def test_one_cause_is_one_problem():
    """Without torch, the check of torch has the problem; the checks that need torch refer to it."""
    found = {result.name: result for result in examine(without_torch()) if result.group == "gpus"}
    (torch,) = (result for result in examine(without_torch()) if result.name == "torch")
    assert (torch.status, torch.value) == ("problem", "ImportError: no torch")
    assert {result.value for result in found.values()} == {"not checked"}
    assert {result.remedy for result in found.values()} == {"fix the check `torch` first"}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: f"{check.group}: {check.name}")
def test_every_check_is_documented(check: Check):
    """The page is generated from the docstrings."""
    text = str(check.examine.__doc__)
    first, *others = (" ".join(paragraph.split()) for paragraph in text.strip().split("\n\n"))
    assert first.endswith(".")
    assert all(": " in paragraph for paragraph in others if paragraph.startswith(("Warning", "Problem")))


def test_names_are_used_once():
    names = [(check.group, check.name) for check in CHECKS]
    assert len(set(names)) == len(names)
