"""Calibration beside scikit-learn and arithmetic by hand, and under layouts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from sklearn.calibration import calibration_curve
from sklearn.metrics import brier_score_loss, f1_score

from tests.helpers.ranks import RankPools
from tests.helpers.tiny_run import write_tiny_run
from tests.helpers.training import TINY_TASKS, tiny_recipe, tiny_split, tiny_task, tiny_training
from tests.parity.test_tasks import LAYOUTS
from trainer.cli import main
from trainer.data.collate import Padding
from trainer.data.loader import EvalLoader
from trainer.features.calibration.metrics import NUM_BINS
from trainer.observe.observer import Observer
from trainer.recipe.schema import SequenceClassification
from trainer.tasks.metrics.table import METRICS
from trainer.tasks.registry import build_task
from trainer.training.whole_split import Evaluator

NAMES = ["ece", "brier", "best_threshold_per_class", "best_f1_per_class"]
RANDOM = np.random.default_rng(0)
LABELS = RANDOM.choice(3, 200, p=[0.5, 0.3, 0.2])
LOGITS = torch.tensor(2 * RANDOM.normal(size=(200, 3)) + np.eye(3)[LABELS], dtype=torch.float32)
LISTS = RANDOM.integers(0, 2, (200, 3))


def computed(logits: torch.Tensor, labels: Any, multi_label: bool = False) -> dict[str, float]:
    """Return the metrics of a task with the classes a, b, ..., over microbatches of 13 rows."""
    names, truth = list("abc"[: logits.shape[1]]), torch.as_tensor(labels)
    section = SequenceClassification.model_validate(
        {"type": "sequence_classification", "text": "text", "labels": names, "metrics": NAMES}
        | ({"multi_label": True} if multi_label else {})
    )
    rows = {"text": ["x"] * 2, "label": [["a"], ["b"]] if multi_label else ["a", "b"]}
    task = build_task(section).resolve(datasets.Dataset.from_dict(rows), "rows")
    truth = truth.float() if multi_label else truth
    pieces = [task.predictions(logits[rows], truth[rows]) for rows in torch.arange(len(logits)).split(13)]
    return task.metrics({name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]})


def curve_error(right: Any, confidence: Any) -> float:
    """Return the calibration error from the points of scikit-learn's curve, which leaves empty bins out."""
    share, mean = calibration_curve(right, confidence, n_bins=NUM_BINS)
    counts = np.histogram(confidence, np.linspace(0, 1, NUM_BINS + 1))[0]
    return float(np.abs(share - mean) @ counts[counts > 0] / len(confidence))


@pytest.mark.parametrize("num_classes", [2, 3])
def test_errors_of_classes_equal_sklearn(num_classes: int):
    logits, labels = LOGITS[:, :num_classes], LABELS % num_classes
    probabilities = logits.double().softmax(-1).numpy()
    found = computed(logits, labels)
    right = probabilities.argmax(1) == labels
    assert found["ece"] == pytest.approx(curve_error(right, probabilities.max(1)), rel=1e-5)
    given = probabilities[:, 1] if num_classes == 2 else probabilities
    assert found["brier"] == pytest.approx(brier_score_loss(labels, given), rel=1e-5)


def test_errors_of_lists_are_over_all_decisions():
    found = computed(LOGITS, LISTS, multi_label=True)
    probabilities = LOGITS.double().sigmoid().numpy()
    assert found["ece"] == pytest.approx(curve_error(LISTS.ravel(), probabilities.ravel()), rel=1e-5)
    assert found["brier"] == pytest.approx(brier_score_loss(LISTS.ravel(), probabilities.ravel()), rel=1e-5)


def test_the_picture_has_the_points_of_the_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A page of the report draws them beside the diagonal."""
    from tests.tools.report.test_report import figures_of

    options: dict[str, Any] = {"task": {"metrics": ["accuracy", "ece"]}, "training": {"max_steps": 2}}
    assert main(["run", str(write_tiny_run(tmp_path, **options))]) == 0
    assert main(["report", str(tmp_path / "run")]) == 0
    _, points = figures_of(tmp_path / "run" / "report.html")["reliability at step 2"]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if "eval" in line][-1]
    picture = last["picture"]["ece"]
    assert (points["x"], points["y"]) == (picture["confidence"], picture["right"])
    gaps = np.abs(np.array(picture["confidence"]) - picture["right"])
    assert last["eval"]["ece"] == pytest.approx(np.average(gaps, weights=picture["rows"]))
    assert np.average(picture["right"], weights=picture["rows"]) == pytest.approx(last["eval"]["accuracy"])

    capsys.readouterr()
    metrics = "task.metrics=accuracy,ece,brier,best_threshold_per_class"
    assert main(["evaluate", str(tmp_path / "run"), metrics, "--json"]) == 0
    evaluated = json.loads(capsys.readouterr().out)["metrics"]
    assert evaluated["ece"] == pytest.approx(last["eval"]["ece"], rel=1e-5)
    assert {"brier", "best_threshold/a", "best_threshold/c"} < evaluated.keys()

    task = tiny_task(tiny_recipe(task={"metrics": ["ece"]}))
    found = task.picture(task.predictions(LOGITS, torch.as_tensor(LABELS)), None)
    assert found is not None
    probabilities = LOGITS.double().softmax(-1).numpy()
    share, mean = calibration_curve(probabilities.argmax(1) == LABELS, probabilities.max(1), n_bins=NUM_BINS)
    assert found["ece"]["right"] == pytest.approx(share.tolist())
    assert found["ece"]["confidence"] == pytest.approx(mean.tolist(), rel=1e-6)


def test_an_error_by_hand():
    """Two rows of 0.8 with one right, in one bin, and one of 0.6 that is right: (2 * 0.3 + 0.4) / 3."""
    shares = torch.tensor([[0.8, 0.2], [0.8, 0.2], [0.6, 0.4]]).double()
    assert computed(shares.log(), [0, 1, 0])["ece"] == pytest.approx(1 / 3, rel=1e-6)


@pytest.mark.parametrize("multi_label", [False, True])
def test_no_threshold_has_a_better_f1(multi_label: bool):
    lists = LISTS[:60]
    logits = LOGITS[:60] if multi_label else LOGITS[:60, :2]
    labels = lists if multi_label else LABELS[:60] % 2
    found = computed(logits, labels, multi_label)
    wide = logits.double()
    probabilities = (wide.sigmoid() if multi_label else wide.softmax(-1)).float().numpy()
    for place, name in enumerate("abc"[: logits.shape[1]]):
        truth, column = lists[:, place] if multi_label else labels == place, probabilities[:, place]
        best = max(f1_score(truth, column > one) for one in [0.0, *column])
        assert found[f"best_f1/{name}"] == pytest.approx(best, rel=1e-12)
        assert f1_score(truth, column > found[f"best_threshold/{name}"]) == pytest.approx(best, rel=1e-12)
    if not multi_label:
        assert found["best_f1/b"] > f1_score(labels, probabilities.argmax(1))


def test_the_threshold_lies_between_two_probabilities():
    shares = torch.tensor([[0.9, 0.1], [0.7, 0.3], [0.6, 0.4], [0.6, 0.4]]).double()
    found = computed(shares.log(), [0, 0, 1, 1])
    assert (found["best_threshold/b"], found["best_f1/b"]) == (pytest.approx(0.35), 1.0)
    assert found["best_threshold/a"] == pytest.approx(0.65)


def test_a_class_without_rows_and_a_diverged_model_are_undefined():
    found = computed(LOGITS, np.zeros(200, int))
    assert {name for name, value in found.items() if math.isnan(value)} == {
        f"{name}/{one}" for name in ("best_threshold", "best_f1") for one in "bc"
    }
    assert all(map(math.isnan, computed(torch.full((200, 3), math.nan), LABELS).values()))


def metrics_of(lists: bool, **parallel: Any) -> dict[str, float]:
    """Return the metrics of an untrained model on this rank, for seven rows."""
    recipe = tiny_recipe(
        task={"type": "sequence_classification", "metrics": NAMES, "multi_label": lists},
        model={"config": {**tiny_recipe().model.config, "initializer_range": 0.5}},
        parallel=parallel,
    )
    with tiny_training(recipe) as training:
        split = TINY_TASKS["multi_label"].split(7) if lists else tiny_split(7)
        loader = EvalLoader(split, 2, training.mesh.index("dp"), training.mesh.size("dp"), Padding(0))
        return Evaluator(training.engine, loader, 7, tiny_task(recipe), training.mesh, Observer()).evaluate().metrics


@pytest.mark.parametrize(
    ("lists", "world_size", "keys"),
    [(False, 3, {"strategy": "fsdp"}), (True, 2, LAYOUTS["pipeline"][1]["parallel"])],
)
def test_any_layout_gives_the_metrics_of_one_process(
    ranks: RankPools, lists: bool, world_size: int, keys: dict[str, Any]
):
    """The last batch of seven rows is not full, and ranks have different numbers of rows."""
    expected = metrics_of(lists)
    loss = expected.pop("loss")
    for found in ranks(world_size).run(metrics_of, lists, **keys):
        assert found.pop("loss") == pytest.approx(loss, rel=1e-5)
        assert found == pytest.approx(expected, rel=1e-5, nan_ok=True)


def test_errors_are_better_if_lower_and_thresholds_select_no_model():
    assert [METRICS[name].greater_is_better for name in NAMES[:2]] == [False, False]
    section = SequenceClassification.model_validate(
        {"type": "sequence_classification", "text": "text", "metrics": [*NAMES[2:], "ece"]}
    )
    assert section.selecting == ["ece", "loss"]
