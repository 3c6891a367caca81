import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tensorboard")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.observe.samples import end_record, run_info, step_record
from trainer.base.errors import UsageError
from trainer.features.trackers.tensorboard import TensorBoard
from trainer.observe.records import EvaluationRecord


def read(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return events


def write(folder: Path, steps: range, resumed_from: int | None = None, loss: float = 0.5) -> None:
    board = TensorBoard()
    board.start(run_info(folder, resumed_from=resumed_from))
    for step in steps:
        board.step(step_record(step, loss=loss))
        board.evaluation(EvaluationRecord(step, {"accuracy": step / 8}))
    board.end(end_record(folder))
    board.close()


def points(folder: Path, name: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read(folder).Scalars(name)]


def test_the_events_read_back(tmp_path):
    write(tmp_path, range(1, 4))
    assert points(tmp_path, "train/loss") == [(1, 0.5), (2, 0.5), (3, 0.5)]
    assert points(tmp_path, "eval/accuracy") == [(1, 0.125), (2, 0.25), (3, 0.375)]
    names = read(tmp_path).Tags()["scalars"]
    assert {"train/grad_norm", "train/learning_rate", "train/tokens_per_second"} <= set(names)
    assert not {"train/step", "train/mfu", "train/loss_scale"} & set(names)


def test_the_recipe_is_there_to_read(tmp_path):
    write(tmp_path, range(1, 2))
    (event,) = read(tmp_path).Tensors("recipe/text_summary")
    assert b'"name": "small"' in event.tensor_proto.string_val[0]


def test_a_resumed_run_leaves_no_double_points(tmp_path):
    write(tmp_path, range(1, 6), loss=0.5)
    write(tmp_path, range(4, 8), resumed_from=3, loss=0.25)
    assert points(tmp_path, "train/loss") == [(1, 0.5), (2, 0.5), (3, 0.5), (4, 0.25), (5, 0.25), (6, 0.25), (7, 0.25)]


def test_a_start_from_the_first_step_hides_the_run_before(tmp_path):
    write(tmp_path, range(1, 6), loss=0.5)
    write(tmp_path, range(1, 3), loss=0.25)
    assert points(tmp_path, "train/loss") == [(1, 0.25), (2, 0.25)]


def test_a_missing_package_is_refused_with_its_installation(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UsageError, match=r'pip install "recipe-trainer\[tensorboard\]"') as error:
        TensorBoard()
    assert "`logging.to`" in str(error.value)


def test_the_package_is_loaded_only_when_it_is_asked_for():
    packages = {"torch", "tensorboard", "rich", "wandb", "mlflow"}
    code = f"import sys, trainer.observe.builders; print(sorted({packages} & set(sys.modules)))"
    command = [sys.executable, "-c", code]
    root = Path(__file__).parents[2]
    shown = subprocess.run(command, cwd=root, timeout=120, capture_output=True, text=True, check=True).stdout
    assert shown == "[]\n"
