import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.observe.samples import run_info, step_record
from trainer.base.errors import UsageError
from trainer.features.csv_metrics.csv_files import TRAINING_FILE_NAME, CsvFiles
from trainer.observe.metrics_file import METRICS_FILE_NAME, MetricsFile
from trainer.observe.observer import Observers
from trainer.observe.records import EvaluationRecord
from trainer.tools.run_metrics import read_metrics


def write(folder: Path, steps: range, resumed_from: int | None = None) -> Path:
    """Trains from one step to another, with an evaluation every five steps."""
    file = MetricsFile()
    file.start(run_info(folder, resumed_from=resumed_from))
    for step in steps:
        file.step(step_record(step))
        if step % 5 == 0:
            file.evaluation(EvaluationRecord(step, {"accuracy": step / 100}))
    file.close()
    return folder / METRICS_FILE_NAME


def test_lines_equal_the_documentation(tmp_path):
    path = write(tmp_path / "runs" / "small", range(5, 6))
    run, step, evaluation = (json.loads(line) for line in path.read_text().splitlines())
    assert list(run) == ["run"]
    assert run["run"]["layout"] == "dp_replicate 2"
    assert run["run"]["versions"] == {"torch": "2.13.0"}
    assert run["run"]["recipe_hash"] == "0123456789abcdef"
    assert run["run"]["folder"] == str(path.parent)
    assert list(step) == [
        "step", "epoch", "loss", "grad_norm", "learning_rate", "samples", "tokens", "step_seconds",
        "samples_per_second", "tokens_per_second", "peak_memory_bytes",
    ]  # fmt: skip
    assert evaluation == {"step": 5, "eval": {"accuracy": 0.05}}


def test_fp16_and_a_known_peak_add_their_keys(tmp_path):
    file = MetricsFile()
    file.start(run_info(tmp_path))
    file.step(step_record(1, skipped_steps=0, loss_scale=65536.0, mfu=0.4))
    file.close()
    line = json.loads((tmp_path / METRICS_FILE_NAME).read_text().splitlines()[1])
    assert line["skipped_steps"] == 0
    assert line["loss_scale"] == 65536.0
    assert line["mfu"] == 0.4


def test_written_records_read_back(tmp_path):
    metrics = read_metrics(write(tmp_path, range(1, 11)))
    assert len(metrics.runs) == 1
    assert metrics.steps == [step_record(step) for step in range(1, 11)]
    assert metrics.evaluations == [EvaluationRecord(5, {"accuracy": 0.05}), EvaluationRecord(10, {"accuracy": 0.1})]


@settings(max_examples=200, deadline=None)
@given(loss=st.floats(), grad_norm=st.floats())
def test_every_float_reads_back_bit_for_bit(tmp_path_factory, loss, grad_norm):
    folder = tmp_path_factory.mktemp("floats")
    file = MetricsFile()
    file.start(run_info(folder))
    file.step(step_record(1, loss=loss, grad_norm=grad_norm))
    file.close()
    (record,) = read_metrics(folder / METRICS_FILE_NAME).steps
    for written, read in ((loss, record.loss), (grad_norm, record.grad_norm)):
        assert read == written or (math.isnan(read) and math.isnan(written))
        assert math.copysign(1, read) == math.copysign(1, written) or math.isnan(written)


def test_a_neighbouring_float_is_another_number(tmp_path):
    loss = 0.1
    file = MetricsFile()
    file.start(run_info(tmp_path))
    file.step(step_record(1, loss=loss))
    file.step(step_record(2, loss=math.nextafter(loss, 1)))
    file.close()
    first, second = read_metrics(tmp_path / METRICS_FILE_NAME).steps
    assert 0 < second.loss - first.loss < 2e-17


def test_numbers_that_are_not_finite_are_still_valid_json(tmp_path):
    file = MetricsFile()
    file.start(run_info(tmp_path))
    file.step(step_record(1, loss=math.nan, grad_norm=math.inf))
    file.evaluation(EvaluationRecord(1, {"loss": -math.inf}))
    file.close()

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    _, step, evaluation = (
        json.loads(line, parse_constant=refuse) for line in (tmp_path / METRICS_FILE_NAME).read_text().splitlines()
    )
    assert (step["loss"], step["grad_norm"], evaluation["eval"]["loss"]) == ("NaN", "Infinity", "-Infinity")
    assert read_metrics(tmp_path / METRICS_FILE_NAME).evaluations[0].metrics["loss"] == -math.inf


def test_resuming_drops_the_steps_that_are_done_again(tmp_path):
    write(tmp_path, range(1, 11))
    path = write(tmp_path, range(7, 13), resumed_from=6)
    metrics = read_metrics(path)
    assert [record.step for record in metrics.steps] == list(range(1, 13))
    assert [record.step for record in metrics.evaluations] == [5, 10]
    assert [run["resumed_from"] for run in metrics.runs] == [None, 6]
    assert len(path.read_text().splitlines()) == 2 + 12 + 2  # readers leave repeated steps out by themselves
    assert list(tmp_path.iterdir()) == [path]


def test_resuming_leaves_earlier_lines_byte_for_byte(tmp_path):
    before = write(tmp_path, range(1, 11)).read_bytes()
    after = write(tmp_path, range(11, 12), resumed_from=10).read_bytes()
    assert after.startswith(before)


def test_a_start_from_the_first_step_begins_a_new_file(tmp_path):
    write(tmp_path, range(1, 11))
    metrics = read_metrics(write(tmp_path, range(1, 3)))
    assert len(metrics.runs) == 1
    assert [record.step for record in metrics.steps] == [1, 2]


def test_readers_leave_out_the_runs_before_the_last_one(tmp_path):
    earlier = write(tmp_path / "earlier", range(1, 11)).read_bytes()
    path = write(tmp_path, range(1, 8))
    path.write_bytes(b"[damaged]\n" + earlier + path.read_bytes())
    metrics = read_metrics(path)
    assert len(metrics.runs) == 1
    assert [record.step for record in metrics.steps] == list(range(1, 8))
    files = Observers([MetricsFile(), CsvFiles()])
    files.start(run_info(tmp_path, resumed_from=6))
    files.close()
    metrics = read_metrics(path)
    assert [run["resumed_from"] for run in metrics.runs] == [None, 6]
    assert [record.step for record in metrics.evaluations] == [5]
    assert [line.split(",")[0] for line in (tmp_path / TRAINING_FILE_NAME).read_text().splitlines()[1:]] == list(
        "123456"
    )


def test_readers_count_each_step_of_joined_parts_of_a_run_once(tmp_path):
    """Parts that were resumed in other folders, from the last step but some."""
    parts = [write(tmp_path / "a", range(1, 11)), write(tmp_path / "b", range(7, 13), resumed_from=6)]
    parts += [write(tmp_path / "c", range(6, 8), resumed_from=5), write(tmp_path / "d", range(8, 9), resumed_from=7)]
    path = tmp_path / METRICS_FILE_NAME
    path.write_bytes(b"".join(part.read_bytes() for part in parts))
    files = Observers([MetricsFile(), CsvFiles()])
    files.start(run_info(tmp_path, resumed_from=8))
    files.close()
    metrics = read_metrics(path)
    assert [run["resumed_from"] for run in metrics.runs] == [None, 6, 5, 7, 8]
    assert [record.step for record in metrics.steps] == list(range(1, 9))
    assert [record.step for record in metrics.evaluations] == [5]
    assert len((tmp_path / TRAINING_FILE_NAME).read_text().splitlines()) == 1 + 8


def test_a_damaged_line_of_the_last_run_is_counted_from_the_start_of_the_file(tmp_path):
    path = write(tmp_path, range(1, 3))
    path.write_bytes(path.read_bytes() * 2 + b'[damaged]\n{"step": 3}\n')
    with pytest.raises(UsageError, match="line 7 of"):
        read_metrics(path)


def test_a_resumed_run_without_a_file_starts_one(tmp_path):
    metrics = read_metrics(write(tmp_path, range(7, 9), resumed_from=6))
    assert [record.step for record in metrics.steps] == [7, 8]


def test_a_last_line_cut_at_any_byte_costs_that_line_alone(tmp_path):
    path = write(tmp_path, range(1, 4))
    whole = path.read_bytes()
    last_line = len(whole.splitlines(keepends=True)[-1])
    for cut in range(1, last_line + 1):
        path.write_bytes(whole[:-cut])
        expected = [1, 2, 3] if cut == 1 else [1, 2]  # a line that lacks only its line break is whole
        assert [record.step for record in read_metrics(path).steps] == expected
    metrics = read_metrics(write(tmp_path, range(3, 5), resumed_from=2))
    assert [record.step for record in metrics.steps] == [1, 2, 3, 4]


def test_written_records_survive_a_kill(tmp_path):
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from tests.observe.samples import run_info, step_record\n"
        "from trainer.observe.metrics_file import MetricsFile\n"
        "file = MetricsFile(); file.start(run_info(Path(sys.argv[1])))\n"
        "for step in range(1, 8): file.step(step_record(step))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=root, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert [record.step for record in read_metrics(tmp_path / METRICS_FILE_NAME).steps] == list(range(1, 8))


@pytest.mark.parametrize("line", ["[1]", "{}", "12", "not JSON", '{"step": "one"}'])
def test_a_file_of_another_kind_is_refused_before_it_is_touched(tmp_path, line):
    path = tmp_path / METRICS_FILE_NAME
    path.write_text(f'{line}\n{{"run": {{}}}}\n')
    before = path.read_bytes()
    with pytest.raises(UsageError, match="line 1 of"):
        write(tmp_path, range(1, 2), resumed_from=1)
    assert path.read_bytes() == before


def test_a_line_with_an_unknown_field_is_refused_by_the_reader(tmp_path):
    path = write(tmp_path, range(1, 2))
    path.write_text(path.read_text() + '{"step": 2, "speed": 1}\n')
    with pytest.raises(UsageError, match="version that wrote it"):
        read_metrics(path)


def test_a_folder_that_cannot_be_made_is_the_users_to_mend(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"`checkpoint\.folder` must be a folder that can be written"):
        MetricsFile().start(run_info(tmp_path / "file" / "run"))


def test_a_kill_while_the_file_is_rewritten_loses_nothing(tmp_path, monkeypatch):
    path = write(tmp_path, range(1, 11))
    before = path.read_bytes()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        MetricsFile().start(replace(run_info(tmp_path), resumed_from=3))
    assert path.read_bytes() == before


@pytest.mark.parametrize("line", ["[1]", "3", "null", '"run"', '{"loss": 1}', '{"step": "1"}', '{"step": true}', "{"])
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: str):
    record = MetricsFile()
    record.start(run_info(tmp_path))
    record.step(step_record(1))
    record.close()
    file = tmp_path / METRICS_FILE_NAME
    written = file.read_text()
    file.write_text(f"{written}\n{line}\n{written.splitlines()[1]}\n")
    with pytest.raises(UsageError, match=r"line \d+ of .* must be an object that holds `run` or `step`, but is"):
        read_metrics(file)
