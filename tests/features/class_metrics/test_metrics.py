"""Metrics of classes beside scikit-learn: averages, numbers of each class, undefined ones, and layouts."""

from __future__ import annotations

import json
import math
import warnings
from typing import Any

import datasets
import numpy as np
import pytest
import sklearn.metrics as sk
import torch

from tests.helpers.ranks import RankPools
from tests.helpers.tiny_run import write_tiny_run
from tests.helpers.training import TINY_TASKS, tiny_recipe, tiny_split, tiny_task, tiny_training
from tests.parity.test_tasks import LAYOUTS
from trainer.cli import main
from trainer.data.collate import Padding
from trainer.data.loader import EvalLoader
from trainer.observe.observer import Observer
from trainer.recipe.reading.loading import load_recipe
from trainer.recipe.schema import SequenceClassification
from trainer.tasks.metrics.table import METRICS
from trainer.tasks.registry import build_task
from trainer.training.whole_split import Evaluator

DECISIONS, SCORES = ("f1", "precision", "recall"), ("roc_auc", "average_precision")
AVERAGES = ("macro", "micro", "weighted")
AVERAGED = [f"{score}_{average}" for score in (*DECISIONS, *SCORES) for average in AVERAGES]
EACH = [f"{score}_per_class" for score in (*DECISIONS, *SCORES)]
RANDOM = np.random.default_rng(0)
LABELS = RANDOM.choice(3, 120, p=[0.5, 0.3, 0.2])
LOGITS = torch.tensor(RANDOM.normal(size=(120, 3)) + np.eye(3)[LABELS], dtype=torch.float32)
LISTS = RANDOM.integers(0, 2, (120, 3))


def computed(metrics: list[str], logits: torch.Tensor, labels: Any, **keys: Any) -> dict[str, float]:
    """Return metrics of a task with the classes a, b, ..., over microbatches of 13 rows, without a warning."""
    names, truth = list("abcdef"[: logits.shape[1]]), torch.as_tensor(labels)
    section = SequenceClassification(type="sequence_classification", text="text", labels=names, metrics=metrics, **keys)
    lists = section.multi_label
    rows = {"text": ["x"] * 2, "label": [["a"], ["b"]] if lists else ["a", "b"]}
    task = build_task(section).resolve(datasets.Dataset.from_dict(rows), "rows")
    truth = truth.float() if lists else truth
    pieces = [task.predictions(logits[rows], truth[rows]) for rows in torch.arange(len(logits)).split(13)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return task.metrics({name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]})


def by_sklearn(score: str, average: str | None, truth: Any, decided: Any, probabilities: Any) -> Any:
    if score in DECISIONS:
        return getattr(sk, f"{score}_score")(truth, decided, average=average)
    return getattr(sk, f"{score}_score")(truth, probabilities, average=average)


@pytest.mark.parametrize("lists", [False, True], ids=["classes", "multi_label"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_averages_and_classes_equal_sklearn(lists: bool, dtype: torch.dtype):
    """By rounding, many probabilities are equal."""
    logits = (2 * LOGITS).round().to(dtype) / 2
    wide = logits.double()
    probabilities = (wide.sigmoid() if lists else wide.softmax(-1)).float().numpy()
    labels = LISTS if lists else LABELS
    truth = LISTS if lists else np.eye(3, dtype=int)[LABELS]
    decided = (probabilities > 0.5).astype(int) if lists else probabilities.argmax(1)
    found = computed([*AVERAGED, *EACH], logits, labels, multi_label=lists)
    expected: dict[str, float] = {}
    for score in (*DECISIONS, *SCORES):
        of = labels if score in DECISIONS else truth
        for average in AVERAGES:
            expected[f"{score}_{average}"] = by_sklearn(score, average, of, decided, probabilities)
        numbers = by_sklearn(score, None, of, decided, probabilities)
        expected |= {f"{score}/{name}": number for name, number in zip("abc", numbers, strict=True)}
    assert len(np.unique(probabilities)) < probabilities.size - 50, "ties"
    assert found == pytest.approx(expected, rel=1e-12)
    if not lists:  # the definition of scikit-learn for several classes
        assert found["roc_auc_macro"] == pytest.approx(sk.roc_auc_score(LABELS, probabilities, multi_class="ovr"))


@pytest.mark.parametrize("positive", [None, "a", "b"])
def test_metrics_of_one_class_are_of_the_positive_one(positive: str | None):
    logits, labels = LOGITS[:, :2], LABELS % 2
    place = 0 if positive == "a" else 1
    truth, scores = labels == place, logits.double().softmax(-1)[:, place].float().numpy()
    decided = logits.argmax(1).numpy() == place
    expected = {name: getattr(sk, f"{name}_score")(truth, decided) for name in DECISIONS}
    expected |= {name: getattr(sk, f"{name}_score")(truth, scores) for name in SCORES}
    assert computed([*DECISIONS, *SCORES], logits, labels, positive=positive) == pytest.approx(expected, rel=1e-12)


def test_a_class_without_rows_is_undefined_and_means_leave_it_out():
    """The class d has no row, but is predicted; e is neither."""
    logits = torch.cat([LOGITS, torch.randn(120, 2, generator=torch.Generator().manual_seed(0))], 1)
    logits[:, 4] = -9.0
    found = computed([*AVERAGED, *EACH], logits, LABELS)
    probabilities, decided = logits.double().softmax(-1).float().numpy(), logits.argmax(1).numpy()
    assert (decided == 3).any()
    of_classes = {}
    for score in SCORES:
        of_classes[score] = [
            getattr(sk, f"{score}_score")(place == LABELS, probabilities[:, place]) for place in range(3)
        ]
    for average, weights in (("macro", None), ("weighted", np.bincount(LABELS))):
        for score in SCORES:
            assert found[f"{score}_{average}"] == pytest.approx(np.average(of_classes[score], weights=weights))
    recalls = sk.recall_score(LABELS, decided, average=None, labels=range(3))
    assert found["recall_macro"] == pytest.approx(recalls.mean(), rel=1e-12)
    assert found["precision/d"] == found["f1/d"] == 0.0
    undefined = {name for name, value in found.items() if math.isnan(value)}
    assert undefined == {f"{score}/e" for score in (*DECISIONS, *SCORES)} | {
        f"{score}/d" for score in ("recall", *SCORES)
    }


def test_labels_of_no_row_and_of_all_rows():
    lists = LISTS.copy()
    lists[:, 0], lists[:, 1] = 0, 1
    found = computed([*EACH, "roc_auc_macro"], LOGITS, lists, multi_label=True)
    assert {name for name, value in found.items() if math.isnan(value)} == {
        "recall/a", "roc_auc/a", "average_precision/a", "roc_auc/b",
    }  # fmt: skip
    assert found["average_precision/b"] == 1.0
    assert found["roc_auc_macro"] == found["roc_auc/c"]


@pytest.mark.parametrize("name", [*(name for name in AVERAGED if name.startswith("roc_auc_")), "roc_auc"])
def test_one_class_alone_has_no_roc_auc(name: str):
    value = computed([name], LOGITS[:, :2], np.zeros(120, int))[name]
    assert math.isnan(value) == (name != "roc_auc_micro")  # over all decisions together, it is defined


def test_a_model_that_diverged_ends_no_run():
    found = computed(["roc_auc_macro", "average_precision_micro"], torch.full((120, 3), math.nan), LABELS)
    assert all(map(math.isnan, found.values()))


def test_probabilities_travel_for_metrics_that_read_them_only():
    for metrics, reads in ((["accuracy", "recall_per_class"], False), (["roc_auc_macro"], True)):
        task = tiny_task(tiny_recipe(task={"metrics": metrics}))
        assert ("probabilities" in task.predictions(LOGITS, torch.as_tensor(LABELS))) == reads


def evaluated(lists: bool, num_rows: int, **parallel: Any) -> dict[str, float]:
    """Return the metrics of an untrained model on this rank."""
    recipe = tiny_recipe(
        task={"type": "sequence_classification", "metrics": [*AVERAGED, *EACH], "multi_label": lists},
        model={"config": {**tiny_recipe().model.config, "initializer_range": 0.5}},
        parallel=parallel,
    )
    with tiny_training(recipe) as training:
        split = TINY_TASKS["multi_label"].split(num_rows) if lists else tiny_split(num_rows)
        loader = EvalLoader(split, 2, training.mesh.index("dp"), training.mesh.size("dp"), Padding(0))
        return (
            Evaluator(training.engine, loader, num_rows, tiny_task(recipe), training.mesh, Observer())
            .evaluate()
            .metrics
        )


@pytest.mark.parametrize(
    ("lists", "world_size", "keys"),
    [
        (False, 3, {"strategy": "fsdp"}),
        (True, 2, LAYOUTS["pipeline"][1]["parallel"]),
        pytest.param(False, 4, LAYOUTS["zero3-tensor"][1]["parallel"], marks=pytest.mark.slow),
        pytest.param(True, 3, {"strategy": "zero2"}, marks=pytest.mark.slow),
        pytest.param(False, 2, LAYOUTS["pipeline"][1]["parallel"], marks=pytest.mark.slow),
    ],
)
def test_any_layout_gives_the_metrics_of_one_process(
    ranks: RankPools, lists: bool, world_size: int, keys: dict[str, Any]
):
    """The last batch of seven rows is not full, and ranks have different numbers of rows."""
    expected = evaluated(lists, 7)
    assert len({value for value in expected.values() if not math.isnan(value)}) > 8
    loss = expected.pop("loss")
    for found in ranks(world_size).run(evaluated, lists, 7, **keys):
        assert found.pop("loss") == pytest.approx(loss, rel=1e-5)  # fp32 sums of tensor ranks: 1.1e-6
        assert found == pytest.approx(expected, rel=1e-6, nan_ok=True)


def test_a_run_selects_by_roc_auc_and_names_what_is_undefined(tmp_path, capsys: pytest.CaptureFixture[str]):
    metrics = ["recall_per_class", "average_precision", "roc_auc"]
    file = write_tiny_run(tmp_path, task={"metrics": metrics}, logging={"to": ["console", "jsonl"]})
    for name in ("train", "validation"):
        path = tmp_path / f"{name}.jsonl"
        path.write_text(path.read_text().replace('"c"', '"a"'))
    assert main(["run", str(file)]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    found = [line["eval"] for line in lines if "eval" in line]
    assert set(found[0]) == {"loss", "recall/a", "recall/b", "average_precision", "roc_auc"}
    best = max(values["average_precision"] for values in found)  # the first metric that is one number
    assert f"average_precision {best:.4f}" in capsys.readouterr().out
    assert load_recipe(file).recipe.task.selecting == ["average_precision", "roc_auc", "loss"]
    validation = tmp_path / "validation.jsonl"
    validation.write_text(validation.read_text().replace('"b"', '"a"'))
    assert main(["run", str(file), f"checkpoint.folder={tmp_path / 'one'}"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "has no row of 'b', for which recall_per_class, average_precision, roc_auc are undefined: a number" in out
    last = [json.loads(line) for line in (tmp_path / "one" / "metrics.jsonl").read_text().splitlines()]
    assert [line["eval"]["roc_auc"] for line in last if "eval" in line] == ["NaN", "NaN"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (['task.metrics=["roc_auc"]', 'task.labels=["a","b","c"]'], 'has "roc_auc", which needs two classes, .*_macro'),
        (['task.metrics=["roc_auc"]', "task.multi_label=true"], 'has "roc_auc", which applies to one class .*_micro'),
        (["task.positive=a"], "needs a metric of one class; add average_precision or f1 or precision"),
        (['task.metrics=["f1_per_class"]', "evaluation.best=f1_per_class"], "must be one of `task.metrics` or loss"),
    ],
)
def test_recipes_that_cannot_be_meant_are_refused(tmp_path, overrides: list[str], message: str):
    from trainer.base.errors import RecipeError

    with pytest.raises(RecipeError, match=message):
        load_recipe(write_tiny_run(tmp_path), overrides)


def test_every_metric_of_the_folder_has_a_direction():
    assert all(METRICS[name].greater_is_better for name in (*AVERAGED, *EACH, *SCORES))
