import io
from pathlib import Path

import pytest

from tests.observe.samples import end_record, run_info, step_record
from trainer.base.errors import UsageError
from trainer.features.csv_metrics.csv_files import EVALUATION_FILE_NAME, TRAINING_FILE_NAME
from trainer.observe.builders import build_observers
from trainer.observe.metrics_file import METRICS_FILE_NAME
from trainer.recipe.schema import Logging
from trainer.tools.run_metrics import read_metrics


def test_metrics_are_always_written(tmp_path):
    stream = io.StringIO()
    observers = build_observers(Logging(to=[]), stream)
    observers.start(run_info(tmp_path))
    observers.step(step_record(1))
    observers.end(end_record(tmp_path))
    observers.close()
    assert len(read_metrics(tmp_path / METRICS_FILE_NAME).steps) == 1
    assert stream.getvalue() == ""
    assert [path.name for path in tmp_path.iterdir()] == [METRICS_FILE_NAME]


def test_every_destination_is_served(tmp_path):
    pytest.importorskip("tensorboard")
    stream = io.StringIO()
    observers = build_observers(Logging(to=["console", "jsonl", "csv", "tensorboard"]), stream)
    observers.start(run_info(tmp_path))
    observers.close()
    assert stream.getvalue().startswith("small\n")
    assert {path.name for path in tmp_path.iterdir()} == {
        METRICS_FILE_NAME,
        TRAINING_FILE_NAME,
        EVALUATION_FILE_NAME,
        "tensorboard",
    }


def test_the_console_draws_nothing_where_a_file_cannot_be_opened(tmp_path):
    (tmp_path / "file").write_text("")
    stream = io.StringIO()
    with pytest.raises(UsageError):
        build_observers(Logging(to=["console"]), stream).start(run_info(Path(tmp_path / "file" / "run")))
    assert stream.getvalue() == ""
