import io
from pathlib import Path

import pytest

from tests.observe.samples import end_record, run_info, step_record
from trainer.observe.console import PlainConsole, open_console
from trainer.observe.progress import ProgressConsole
from trainer.observe.records import EvaluationRecord

GOLDEN = """\
3.2 % of the texts are longer than 128 tokens and were cut
small
  ranks       2 ranks on cpu, started by trainer
  layout      dp_replicate 2, ddp, fp32
  parameters  1,234,567 split, 109,483,778 replicated; 1.6 GiB of state a rank
  batch       32 rows a step = 2 ranks x 2 microbatches of at most 8
  data        3,668 training rows, 408 validation rows
  steps       345, 115 per epoch
  folder      runs/small

step  20/345  epoch 0.17  loss 0.6800  grad_norm 12.3450  lr 5.00e-05  samples/s 320    tokens/s 33.1k  memory 2.0 GiB    left 0:16:15
step 230/345  epoch 2.00  loss 0.4700  grad_norm 9.0000   lr 0.00e+00  samples/s 320    tokens/s 33.1k  mfu 41.2%  memory 2.0 GiB    left 0:02:30
evaluation at step 230: loss 0.5000  accuracy 0.8125

finished after 345 steps in 0:02:03, exit code 0
  best        accuracy 0.8125 at step 230 (majority class: 0.6838)
  folder      runs/small
  report      trainer report runs/small
  model       runs/small/model
  evaluate    trainer evaluate runs/small
  predict     trainer predict runs/small --input FILE --output FILE
"""  # noqa: E501


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_whole_run_reads_so():
    stream, clock = io.StringIO(), Clock()
    console = PlainConsole(stream, clock)
    console.note("3.2 % of the texts are longer than 128 tokens and were cut")
    console.start(run_info(Path("runs/small")))
    clock.now += 60
    console.step(step_record(20))
    clock.now += 240
    console.step(step_record(230, grad_norm=9.0, learning_rate=0.0, mfu=0.412))
    console.evaluation_progress(1, 2)
    console.evaluation(EvaluationRecord(230, {"loss": 0.5, "accuracy": 0.8125}))
    console.end(end_record(Path("runs/small")))
    console.close()
    assert stream.getvalue() == GOLDEN


@pytest.mark.parametrize("kind", [PlainConsole, ProgressConsole])
def test_a_run_that_fails_before_it_starts_leaves_the_terminal_to_its_error(kind):
    stream = io.StringIO()
    kind(stream).end(
        end_record(
            Path("runs/small"),
            outcome="failed",
            exit_code=2,
            step=0,
            seconds=1.2,
            model_folder=None,
            best=None,
            message="`data.train` must be a split,\nbut is 3",
        )
    )
    assert stream.getvalue() == ""


def test_time_left_counts_from_where_the_run_went_on():
    stream, clock = io.StringIO(), Clock()
    console = PlainConsole(stream, clock)
    console.start(run_info(Path("runs/small"), resumed_from=335))
    clock.now += 5
    console.step(step_record(340))
    assert "resuming after step 335" in stream.getvalue()
    assert stream.getvalue().endswith("left 0:00:05\n")


def test_each_line_is_out_at_once():
    class Counting(io.StringIO):
        flushes = 0

        def flush(self):
            self.flushes += 1

    stream = Counting()
    console = PlainConsole(stream)
    console.note("one")
    console.note("two")
    assert stream.flushes == 2


def test_letters_that_the_stream_lacks_do_not_end_the_training():
    raw = io.BytesIO()
    console = PlainConsole(io.TextIOWrapper(raw, encoding="ascii"))
    console.note("café")
    assert raw.getvalue() == rb"caf\xe9" + b"\n"


def test_no_terminal_no_bar():
    assert type(open_console(io.StringIO())) is PlainConsole


@pytest.mark.parametrize("variable", ["FORCE_COLOR", "TTY_COMPATIBLE"])
def test_a_pipe_stays_plain_under_every_environment(monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    stream = io.StringIO()
    console = open_console(stream)
    console.start(run_info(Path("runs/small")))
    console.close()
    assert "\x1b" not in stream.getvalue()
