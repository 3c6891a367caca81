"""Tests of the second look, on test files written for it and with the rules of `tests/conftest.py`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.helpers import processes

LOOK = """
import sys
from pathlib import Path
from tests.helpers.second_look import main

sys.exit(main(sys.argv[2:], Path(sys.argv[1])))
"""
RULES = 'pytest_plugins = ["tests.conftest"]\n'
FAILS_ONCE = """
from pathlib import Path

def test_sometimes():
    mark = Path(__file__).with_name("mark")
    if not mark.exists():
        mark.touch()
        raise AssertionError("beside others")

def test_good():
    pass
"""
FAILS = "def test_bad():\n    assert False\n"
MANY_FAIL = """
import pytest

@pytest.mark.parametrize("number", range(16))
def test_bad(number):
    assert number < 0
"""
TOO_LONG = """
from tests.helpers import durations

durations.LIMIT_SECONDS = 0.0
durations.slowness = lambda: 0.001

def test_long():
    pass
"""


def look(folder: Path, text: str, *arguments: str) -> tuple[int, str]:
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    alone: as in the project\n")
    (folder / "conftest.py").write_text(RULES)
    (folder / "test_written.py").write_text(text)
    ended = processes.run([sys.executable, "-c", LOOK, folder, *arguments])
    print(ended.stdout, ended.stderr)
    return ended.returncode, ended.stdout


@pytest.mark.slow
def test_a_test_that_passes_alone_is_named_and_does_not_fail_the_run(tmp_path):
    code, shown = look(tmp_path, FAILS_ONCE, "--numprocesses", "2", "--dist", "worksteal")
    assert code == 0
    assert "slowest" in shown
    assert "failed beside other tests, passed alone: test_written.py::test_sometimes\n" in shown
    assert "1 passed" in shown.splitlines()[-1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (FAILS, "failed beside other tests and alone: test_written.py::test_bad"),
        (TOO_LONG, "failed beside other tests and alone: test_written.py::test_long"),
    ],
    ids=["fails", "too_long"],
)
@pytest.mark.slow
def test_a_test_that_fails_again_fails_the_run(tmp_path, text, words):
    code, shown = look(tmp_path, text)
    assert code == pytest.ExitCode.TESTS_FAILED
    assert words in shown


def test_many_failures_decide_at_once(tmp_path):
    code, shown = look(tmp_path, MANY_FAIL)
    assert code == pytest.ExitCode.TESTS_FAILED
    assert "16 failed" in shown.splitlines()[-1]
