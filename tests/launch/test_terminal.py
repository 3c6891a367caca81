"""Whole runs on a terminal: bars from the start, Ctrl-C, and the cursor afterwards."""

from __future__ import annotations

import os
import re
import select
import signal
import time
from collections.abc import Callable

import pytest

from tests.helpers import warm
from tests.helpers.tiny_run import write_tiny_run
from trainer.base.errors import ExitCode

CONSOLE = {"logging": {"every": "1 step", "to": ["console"]}}
SHOW, HIDE = "\x1b[?25h", "\x1b[?25l"


class Terminal:
    """A run of `trainer` on a terminal, and its output so far."""

    def __init__(self, *arguments: object, faulty: bool = False) -> None:
        self.process, self.descriptor = warm.start_on_terminal(arguments, faulty=faulty)
        self.output = ""

    def wait_for(self, pattern: str) -> None:
        self._read(lambda: re.search(pattern, self.output) is not None)
        assert re.search(pattern, self.output), self.output[-2000:]

    def press_ctrl_c(self) -> None:
        os.write(self.descriptor, b"\x03")

    def finish(self) -> int:
        self._read(lambda: False)
        self.process.join(10)
        os.close(self.descriptor)
        assert self.process.exitcode is not None
        return self.process.exitcode

    def _read(self, is_enough: Callable[[], bool]) -> None:
        end = time.monotonic() + 240
        while not is_enough():
            left = end - time.monotonic()
            if left < 0 or not select.select([self.descriptor], [], [], left)[0]:
                os.kill(self.process.pid or 0, signal.SIGKILL)
                raise AssertionError(f"no end: {self.output[-2000:]}")
            try:
                self.output += os.read(self.descriptor, 65536).decode(errors="replace")
            except OSError:  # all processes have closed it
                return


def assert_shows_the_cursor(output: str) -> None:
    assert HIDE in output
    assert output.rindex(SHOW) > output.rindex(HIDE)


@pytest.mark.slow
def test_each_part_of_a_run_has_a_bar(tmp_path):
    terminal = Terminal("run", write_tiny_run(tmp_path, **CONSOLE), "training.max_steps=2", "evaluation.every=2 steps")
    assert terminal.finish() == ExitCode.DONE
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.output)
    parts = ["loading the data", "preparing `[^`]*train.jsonl` +━+ +40/40"]
    parts += [
        "preparing `[^`]*validation.jsonl` +━+ +17/17",
        "checking the model",
        "building the model",
        "training +━+",
        "evaluation at step 2",
    ]
    assert re.search(".*".join(parts), shown, re.DOTALL), shown
    assert_shows_the_cursor(terminal.output)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "processes"), [("once", 2), ("twice", 1), ("twice", 2), ("SIGTERM", 1)])
def test_a_run_that_is_stopped_says_that_it_saves_and_gives_the_cursor_back(how, processes, tmp_path):
    recipe = write_tiny_run(tmp_path, **CONSOLE)
    words = ["run", recipe, "--processes", processes, "training.max_steps=100000", "evaluation.every=100000 steps"]
    fault = ["loop", 0, 3] if how == "twice" else []  # a step that does not end
    terminal = Terminal(*fault, *words, faulty=bool(fault))
    terminal.wait_for(r"step +2/100000")
    if how == "SIGTERM":
        os.kill(terminal.process.pid or 0, signal.SIGTERM)
    else:
        terminal.press_ctrl_c()
    terminal.wait_for("saving a checkpoint after this step, then stopping")
    if how == "twice":
        terminal.press_ctrl_c()
    code = terminal.finish()
    assert_shows_the_cursor(terminal.output)
    is_saved = (tmp_path / "run" / "checkpoints").is_dir() and any((tmp_path / "run" / "checkpoints").iterdir())
    assert is_saved == (how != "twice")
    assert (code == ExitCode.STOPPED) == (how != "twice"), terminal.output[-2000:]


@pytest.mark.slow
def test_ctrl_c_during_the_preparation_gives_the_cursor_back(tmp_path):
    recipe = write_tiny_run(tmp_path, **CONSOLE)
    terminal = Terminal("run", recipe, "--processes", 2)
    terminal.wait_for("loading the data")
    terminal.press_ctrl_c()
    assert terminal.finish() not in (ExitCode.DONE, ExitCode.USER)
    assert_shows_the_cursor(terminal.output)
    assert not (tmp_path / "run" / "checkpoints").exists()
