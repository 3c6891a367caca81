"""The bar as a user sees it: a child process draws it on a pseudo-terminal of 80 columns."""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest

from tests.observe.samples import end_record, run_info
from trainer.observe.console import PlainConsole, open_console
from trainer.observe.progress import ProgressConsole, fold_fields
from trainer.observe.records import EvaluationRecord, MajorityClass

ROOT = Path(__file__).parents[2]

SCREEN = (
    """\
a [bold]note before the start
small
  ranks       2 ranks on cpu, started by trainer
  layout      dp_replicate 2, ddp, fp32
  parameters  1,234,567 split, 109,483,778 replicated; 1.6 GiB of state a rank
  batch       32 rows a step = 2 ranks x 2 microbatches of at most 8
  data        3,668 training rows, 408 validation rows
  steps       345, 115 per epoch
  folder      runs/small

step  20/345  epoch 0.17  loss 0.6800  grad_norm 12.3450  lr 5.00e-05
a library prints [this]
evaluation at step 20: accuracy 0.8125
step 345/345  epoch 3.00  loss 0.3550  grad_norm 12.3450  lr 5.00e-05
training ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━ 345/345 0:00:00 left
epoch 3.00  loss 0.3550  grad_norm 12.3450  lr 5.00e-05  samples/s 320
tokens/s 33.1k  mfu 41.2%  memory 2.0 GiB

stopped after 345 steps in 0:02:03, exit code 75
  best        accuracy 0.8125 at step 230 (majority class: 0.6838)
  folder      runs/small
  report      trainer report runs/small
  model       runs/small/model
  evaluate    trainer evaluate runs/small
  predict     trainer predict runs/small --input FILE --output FILE
  resume      trainer run """
    + "x" * 90
    + "\n"
)

RUN = """
import sys
from pathlib import Path
from tests.observe.samples import end_record, run_info, step_record
from trainer.observe.console import open_console
from trainer.observe.records import EvaluationRecord

folder = Path("runs/small")
console = open_console(sys.stdout)
console.note("a [bold]note before the start")
console.start(run_info(folder))
console.step(step_record(20))
print("a library prints [this]")
console.evaluation_progress(1, 4)
console._live.refresh()
console.evaluation_progress(4, 4)
console.evaluation(EvaluationRecord(20, {"accuracy": 0.8125}))
console.step(step_record(345, mfu=0.412))
console._live.refresh()
console.end(end_record(folder, outcome="stopped", exit_code=75, resume_command="trainer run " + "x" * 90))
console.close()
console.close()
"""


def on_terminal(code: str, columns: int = 80, **environment: str) -> str:
    """What a Python child writes to a terminal; the child is killed after four minutes."""
    terminal, child_end = pty.openpty()
    fcntl.ioctl(child_end, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    variables = {**os.environ, "TERM": "xterm-256color", **environment}
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        variables.pop(name, None)
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, cwd=ROOT, env=variables, stdin=child_end, stdout=child_end, stderr=child_end
    ) as child:
        os.close(child_end)
        alarm = threading.Timer(480, child.kill)
        alarm.start()
        output = b"".join(iter(lambda: _read(terminal), b""))
        alarm.cancel()
    os.close(terminal)
    assert child.returncode == 0, output.decode()
    return output.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux says so when the child has closed its end
        return b""


def screen(output: str) -> list[str]:
    """The lines that stand on a terminal after `output`, those that have scrolled away included."""
    lines, row, column = [""], 0, 0
    for count, command, text in re.findall(r"\x1b\[([0-9;?]*)([A-Za-z])|([^\x1b])", output):
        if command == "A":
            row -= int(count or 1)
        elif command == "K":
            lines[row] = ""
        elif text == "\r":
            column = 0
        elif text == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif text:
            lines[row] = lines[row][:column].ljust(column) + text + lines[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]


@pytest.fixture(scope="module")
def drawn() -> str:
    return on_terminal(RUN)


def test_the_whole_run_leaves_this_on_the_screen(drawn):
    assert "\n".join(screen(drawn)) == SCREEN


def test_an_evaluation_has_a_bar_of_its_own_while_it_runs(drawn):
    during = screen(drawn[: drawn.index("1/4") + 3])
    assert re.fullmatch(r"training +━+.━+ +20/345 [0-9:]+ left", during[-2])
    assert re.fullmatch(r"evaluating +━+.━+ 1/4", during[-1])
    assert "evaluating" not in drawn[drawn.index("m345/345") :]  # of the bar, which has a colour


def test_the_cursor_comes_back(drawn):
    assert drawn.rindex("\x1b[?25h") > drawn.rindex("\x1b[?25l")


def test_a_dumb_terminal_gets_plain_lines():
    output = on_terminal(RUN.replace("console._live.refresh()", ""), TERM="dumb")
    assert "\x1b" not in output
    assert "step  20/345  epoch 0.17" in output


def test_the_bar_moves_between_logged_steps():
    stream = io.StringIO()
    console = ProgressConsole(stream, clock=lambda: 0.0)
    console.start(run_info(Path("runs/small")))
    console.doing(7, "in step 8")
    console.close()
    assert " 7/345" in stream.getvalue()


@pytest.mark.parametrize("console", [PlainConsole, ProgressConsole])
def test_names_from_the_data_cannot_write_to_the_terminal(console):
    """Text of JSON keeps C1 controls and U+2028, and a note may hold a column as it is."""
    stream = io.StringIO()
    shown = console(stream, clock=lambda: 0.0)
    shown.note("column \x1b]0;gone\x07 and \x9b2J")
    shown.start(run_info(Path("runs/\x1b[2J"), majority=MajorityClass("\x9b2J\u2028", 0.5)))
    shown.close()
    assert not re.search("\x1b\\]|\x1b\\[2J|[\x07\x9b\u2028]", stream.getvalue())
    assert "column \\x1b]0;gone\\x07 and \\x9b2J" in stream.getvalue()


def test_the_end_shows_the_curve_of_the_metric():
    stream = io.StringIO()
    console = ProgressConsole(stream, clock=lambda: 0.0)
    console.start(run_info(Path("runs/small")))
    for step, value in [(115, 0.5), (230, 0.75), (345, 0.625)]:
        console.evaluation(EvaluationRecord(step, {"accuracy": value}))
    console.end(end_record(Path("runs/small")))
    assert "  last        accuracy 0.6250 at step 345  ▁█▅\n" in stream.getvalue()


def test_an_error_under_way_gives_the_cursor_back():
    code = (
        RUN.split('print("a library')[0] + "try:\n    raise RuntimeError\nexcept RuntimeError:\n    console.close()\n"
    )
    output = on_terminal(code)
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")


def test_a_stream_that_is_a_terminal_gets_the_bar(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    parent, child = pty.openpty()
    try:
        with open(child, "w", closefd=False) as stream:
            assert type(open_console(stream)) is ProgressConsole
            monkeypatch.setenv("TERM", "dumb")
            assert type(open_console(stream)) is PlainConsole
    finally:
        os.close(parent)
        os.close(child)


def test_a_resumed_bar_starts_where_the_run_went_on():
    stream = io.StringIO()
    console = ProgressConsole(stream, clock=lambda: 0.0)
    console.start(run_info(Path("runs/small"), resumed_from=115))
    console.close()
    assert "115/345" in stream.getvalue()


@pytest.mark.parametrize("width", [10, 20, 40, 80])
def test_fields_fold_between_and_never_within(width):
    fields = [("loss", "0.5"), ("grad_norm", "12.3"), ("lr", "5.00e-05"), ("memory", "2.0 GiB")]
    lines = fold_fields(fields, width).split("\n")
    assert "  ".join(lines) == "loss 0.5  grad_norm 12.3  lr 5.00e-05  memory 2.0 GiB"
    assert all(len(line) <= width or line.count("  ") == 0 for line in lines)
