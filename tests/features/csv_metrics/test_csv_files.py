import csv
import json
import math
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.observe.samples import run_info, step_record
from trainer.base.errors import TrainerError
from trainer.features.csv_metrics import csv_files
from trainer.features.csv_metrics.csv_files import EVALUATION_FILE_NAME, LOGGED_FILE_NAME, TRAINING_FILE_NAME, CsvFiles
from trainer.observe.metrics_file import METRICS_FILE_NAME, MetricsFile, run_lines
from trainer.observe.observer import Observers
from trainer.observe.records import EvaluationRecord, LoggedRecord


def write(folder: Path, steps: range, resumed_from: int | None = None, **metrics: float) -> None:
    """Trains from one step to another beside a `metrics.jsonl`, with an evaluation every five steps."""
    files = Observers([MetricsFile(), CsvFiles()])
    files.start(run_info(folder, resumed_from=resumed_from))
    for step in steps:
        files.step(step_record(step, loss=1 / step))
        if step % 5 == 0:
            files.evaluation(EvaluationRecord(step, {"accuracy": step / 7, **metrics}))
    files.close()


def read(folder: Path, name: str) -> list[dict[str, str]]:
    with (folder / name).open(newline="") as file:
        return list(csv.DictReader(file))


def test_rows_equal_metrics_jsonl(tmp_path):
    write(tmp_path, range(1, 11))
    lines = [json.loads(line) for line in (tmp_path / METRICS_FILE_NAME).read_text().splitlines()[1:]]
    rows = [{name: float(cell) for name, cell in row.items() if cell} for row in read(tmp_path, TRAINING_FILE_NAME)]
    assert rows == [line for line in lines if "eval" not in line]
    rows = [{name: float(cell) for name, cell in row.items()} for row in read(tmp_path, EVALUATION_FILE_NAME)]
    assert rows == [{"step": line["step"], **line["eval"]} for line in lines if "eval" in line]


def test_unknown_values_are_empty_and_non_finite_values_read_back(tmp_path):
    files = Observers([MetricsFile(), CsvFiles()])
    files.start(run_info(tmp_path))
    files.step(step_record(1, tokens=None, loss=math.inf, grad_norm=math.nan))
    files.close()
    (row,) = read(tmp_path, TRAINING_FILE_NAME)
    assert row["tokens"] == row["loss_scale"] == ""
    assert float(row["loss"]) == math.inf
    assert math.isnan(float(row["grad_norm"]))


def test_resuming_drops_the_steps_that_are_done_again_and_writes_no_second_header(tmp_path):
    write(tmp_path, range(1, 11))
    before = (tmp_path / TRAINING_FILE_NAME).read_bytes().splitlines(keepends=True)
    write(tmp_path, range(7, 13), resumed_from=6)
    after = (tmp_path / TRAINING_FILE_NAME).read_bytes().splitlines(keepends=True)
    assert after[:7] == before[:7]
    assert [int(row["step"]) for row in read(tmp_path, TRAINING_FILE_NAME)] == list(range(1, 13))
    assert [int(row["step"]) for row in read(tmp_path, EVALUATION_FILE_NAME)] == [5, 10]


def test_a_start_from_the_first_step_begins_new_files(tmp_path):
    write(tmp_path, range(1, 11))
    write(tmp_path, range(1, 3))
    assert [row["step"] for row in read(tmp_path, TRAINING_FILE_NAME)] == ["1", "2"]
    assert read(tmp_path, EVALUATION_FILE_NAME) == []


def test_a_metric_that_a_resumed_run_adds_is_a_column_at_the_end(tmp_path):
    write(tmp_path, range(1, 11))
    write(tmp_path, range(11, 16), resumed_from=10, f1=0.5)
    rows = read(tmp_path, EVALUATION_FILE_NAME)
    assert list(rows[0]) == ["step", "accuracy", "f1"]
    assert [(row["step"], row["f1"]) for row in rows] == [("5", ""), ("10", ""), ("15", "0.5")]


def test_a_new_column_reads_the_file_once_and_a_start_twice_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No file without its last columns is ever moved into place."""
    headers: list[list[str]] = []

    def read_lines(file: Path) -> Iterator[tuple[int, dict[str, object]]]:
        rows = read(tmp_path, EVALUATION_FILE_NAME) if (tmp_path / EVALUATION_FILE_NAME).exists() else []
        headers.append(list(rows[0]) if rows else [])
        return run_lines(file)

    monkeypatch.setattr(csv_files, "run_lines", read_lines)
    write(tmp_path, range(1, 6))
    assert len(headers) == 2, "at the start, and for the column `accuracy`"
    write(tmp_path, range(6, 11), resumed_from=5, f1=0.5)
    assert len(headers) == 4, "at the start, and for the column `f1`"
    write(tmp_path, range(11, 12), resumed_from=10)
    assert headers[4:] == 2 * [["step", "accuracy", "f1"]], "the first row does not have all columns"


@pytest.mark.parametrize("text", ["step,loss\none,2\n1,2,", f"step\n{'1,' * 1_000_000}", None])
def test_a_resumed_run_writes_all_rows_again(tmp_path: Path, text: str | None):
    write(tmp_path, range(1, 8))
    path = tmp_path / TRAINING_FILE_NAME
    path.unlink() if text is None else path.write_text(text)
    write(tmp_path, range(8, 9), resumed_from=7)
    assert [int(row["step"]) for row in read(tmp_path, TRAINING_FILE_NAME)] == list(range(1, 9))


def test_lines_that_someone_has_edited_have_empty_cells(tmp_path: Path):
    write(tmp_path, range(1, 6))
    path = tmp_path / METRICS_FILE_NAME
    lines = [
        '{"run": {}, "eval": {"accuracy": 1}}',
        '{"step": 2, "eval": 3}',
        '{"step": 3, "eval": {"\\ud800": [1]}}',
        '{"step": 4, "loss": {"a": 1}}',
    ]
    path.write_text(path.read_text() + "\n".join(lines) + "\n")
    write(tmp_path, range(6, 7), resumed_from=5)
    evaluations = read(tmp_path, EVALUATION_FILE_NAME)
    assert evaluations[-2:] == [{"step": "", "accuracy": "1", "?": ""}, {"step": "3", "accuracy": "", "?": "[1]"}]
    assert [row["step"] for row in read(tmp_path, TRAINING_FILE_NAME)] == ["1", "2", "3", "4", "5", "4", "6"]


def test_a_start_leaves_no_numbers_of_callbacks_of_an_earlier_run(tmp_path: Path):
    files = Observers([MetricsFile(), CsvFiles()])
    files.start(run_info(tmp_path))
    files.logged(LoggedRecord(1, {"a": 1.0}))
    files.logged(LoggedRecord(1, {"b": math.inf}))
    files.close()
    assert (tmp_path / LOGGED_FILE_NAME).read_text() == "step,a,b\n1,1.0,\n1,,Infinity\n"
    write(tmp_path, range(1, 2))
    assert not (tmp_path / LOGGED_FILE_NAME).exists()


def test_a_long_file_is_not_held_in_memory(tmp_path: Path):
    path = tmp_path / METRICS_FILE_NAME
    path.write_text("".join(f'{{"step": {step}, "loss": 0.5}}\n' for step in range(50_000)))
    tracemalloc.start()
    try:
        CsvFiles().start(run_info(tmp_path, resumed_from=50_000))
        assert tracemalloc.get_traced_memory()[1] < 1 << 18
    finally:
        tracemalloc.stop()
    assert sum(1 for _ in (tmp_path / TRAINING_FILE_NAME).open()) == 50_001


def test_a_file_that_is_gone_ends_the_run(tmp_path):
    files = Observers([MetricsFile(), CsvFiles()])
    files.start(run_info(tmp_path))
    (tmp_path / TRAINING_FILE_NAME).unlink()
    with pytest.raises(TrainerError, match=r"metrics_training\.csv can no longer be written"):
        files.step(step_record(1))
    files.close()
