"""The record of rows: measures by hand, equal records under every layout, and each row once after a resumption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.training import parallel_keys, tiny_recipe, tiny_training
from trainer.base.errors import RecipeError
from trainer.features.row_losses.measures import kind_of, measured
from trainer.recipe.reading.loading import load_recipe
from trainer.tasks.registry import build_task
from trainer.tools.audit.row_record import read_record

STEPS, BATCH, ROWS = 4, 12, 26
SIZES = (12, 12, 2, 12)  # rows of each step: the last one of an epoch is short
CLASSES = build_task(tiny_recipe().task)


def test_the_margin_is_the_logit_of_the_label_minus_the_largest_other_one():
    logits = torch.tensor([[2.0, 0.5, 1.0], [0.0, 3.0, -1.0]])
    found = measured("classes", CLASSES, logits, torch.tensor([0, 2]))
    assert found["margin"].tolist() == [1.0, -4.0]
    assert found["believed"].tolist() == [0, 1]
    torch.testing.assert_close(found["loss"], -logits.log_softmax(-1)[[0, 1], [0, 2]])


def test_a_row_of_words_shows_its_word_with_the_smallest_margin():
    logits = torch.tensor([[[1.0, 0.0], [0.0, 2.0], [5.0, 0.0]], [[0.0, 1.0], [0.0, 9.0], [0.0, 9.0]]])
    labels = torch.tensor([[0, 0, -100], [1, -100, -100]])
    found = measured("tokens", CLASSES, logits, labels)
    assert found["margin"].tolist() == [-2.0, 1.0]
    assert found["position"].tolist() == [1, 0]
    assert found["believed"].tolist() == [1, 1]
    losses = -logits.log_softmax(-1)[..., 0]
    torch.testing.assert_close(found["loss"][0], losses[0, :2].mean())


def test_a_row_of_several_labels_shows_the_label_with_the_smallest_margin():
    scores, labels = torch.tensor([[3.0, -2.0, 0.5]]), torch.tensor([[1.0, 1.0, 0.0]])
    found = measured("labels", CLASSES, scores, labels)
    assert found["margin"].tolist() == [-2.0]
    assert (found["label"].tolist(), found["believed"].tolist()) == ([1], [-1])


def test_other_rows_have_the_loss_of_their_task():
    task = build_task(tiny_recipe(task={"type": "sequence_regression"}).task)
    scores, labels = torch.tensor([[1.0], [3.0]]), torch.tensor([0.0, 1.0])
    assert kind_of(task, scores, labels) == "losses"
    assert measured("losses", task, scores, labels)["loss"].tolist() == [1.0, 4.0]


def recorded(parallel: dict[str, Any], folder: str, stop: int = STEPS, micro: int = BATCH, **other: Any) -> None:
    recipe = tiny_recipe(
        parallel=parallel,
        training={"global_batch_size": BATCH, "micro_batch_size": micro},
        logging={"rows": True},
        checkpoint={"folder": folder},
        **other,
    )
    with tiny_training(recipe, num_rows=ROWS) as training:
        training.steps(stop)
        training.engine.state()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("alone")
    recorded({}, str(folder))
    return read_record(folder)


def test_each_row_of_each_step_is_recorded_once(alone: Any):
    steps, places = alone.records["step"], alone.records["place"]
    assert list(zip(steps, places, strict=True)) == [
        (s, place) for s, size in enumerate(SIZES) for place in range(size)
    ]
    assert len(alone.classes) == alone.records["probabilities"].shape[1]


LAYOUTS = {
    "3 ranks": (3, parallel_keys("ddp", 3), 2),
    "accumulation": (1, {}, 5),
    "fsdp": (2, parallel_keys("fsdp", 2), 4),
    "tensor ranks": (2, {"tensor": 2}, 12),
    "stages": (2, {"pipeline": {"stages": 2, "microbatches": 2}}, 12),
}


@pytest.mark.parametrize("name", [*LAYOUTS])
def test_layouts_record_the_same(ranks: Any, tmp_path: Path, alone: Any, name: str):
    number, parallel, micro = LAYOUTS[name]
    ranks(number).run(recorded, parallel, str(tmp_path), STEPS, micro)
    found = read_record(tmp_path)
    for field in ("step", "place", "label", "believed"):
        np.testing.assert_array_equal(found.records[field], alone.records[field])
    for field in ("loss", "margin"):
        np.testing.assert_allclose(found.records[field], alone.records[field], atol=1e-5)


def test_a_later_start_replaces_the_steps_from_its_first_one(tmp_path: Path, alone: Any):
    recorded({}, str(tmp_path))
    (first,) = (tmp_path / "rows").iterdir()
    # A start after three steps, which has written the fourth.
    head = first.read_bytes().partition(b"\n")[0]
    of_step = alone.records[alone.records["step"] == 3].copy()
    of_step["loss"] = 9
    (tmp_path / "rows" / "from-000000003-rank-00001.rows").write_bytes(head + b"\n" + of_step.tobytes())
    found = read_record(tmp_path).records
    assert len(found) == sum(SIZES)
    assert (found["loss"][found["step"] == 3] == 9).all()
    # A new training in the folder removes it.
    recorded({}, str(tmp_path))
    np.testing.assert_array_equal(read_record(tmp_path).records, alone.records)


def test_the_incomplete_end_of_a_file_is_not_read(tmp_path: Path, alone: Any):
    recorded({}, str(tmp_path))
    (file,) = (tmp_path / "rows").iterdir()
    file.write_bytes(file.read_bytes()[:-5])
    found = read_record(tmp_path)
    np.testing.assert_array_equal(found.records, alone.records[:-1])
    assert "incomplete" in found.notes[0]


def test_off_means_no_file(tmp_path: Path):
    with tiny_training(tiny_recipe(checkpoint={"folder": str(tmp_path)}), num_rows=ROWS) as training:
        training.steps(1)
        training.engine.state()
    assert not [*tmp_path.iterdir()]


def test_a_graph_has_no_rows_to_show():
    with pytest.raises(RecipeError, match=r"`logging.rows` is true, but a CUDA graph"):
        load_recipe("bert_sample", ["logging.rows=true", "cuda_graphs=true"])
