from __future__ import annotations

import datasets
import numpy as np
import pytest
import sklearn.metrics
import torch

from trainer.base.errors import DataError, UsageError
from trainer.recipe.schema import SequenceClassification
from trainer.tasks.registry import build_task

WHERE = "`rows.jsonl`"
DECLARED = datasets.Features(
    {"text": datasets.Value("string"), "label": datasets.List(datasets.ClassLabel(names=["b", "a"]))}
)


def task_of(**keys):
    return build_task(
        SequenceClassification(type="sequence_classification", text="text", multi_label=True, **keys)
    )  # fmt: skip


def rows_of(labels, features=None):
    return datasets.Dataset.from_dict({"text": ["a text"] * len(labels), "label": labels}, features)


def labels_of(task, rows, tokenizer, first_row=0):
    return [array.tolist() for array in task.encode(rows, tokenizer, 16, WHERE, first_row)["labels"]]


def resolved(*labels, **keys):
    return task_of(**keys).resolve(rows_of(list(labels)), WHERE)


@pytest.mark.parametrize(
    ("keys", "rows", "names", "expected"),
    [
        ({}, rows_of([["b"], [], ["a", "b"]]), ["a", "b"], [[0, 1], [0, 0], [1, 1]]),
        ({"labels": ["b", "a", "rare"]}, rows_of([["b"], []]), ["b", "a", "rare"], [[1, 0, 0], [0, 0, 0]]),
        ({}, rows_of([[0], [1, 0], []], DECLARED), ["b", "a"], [[1, 0], [1, 1], [0, 0]]),
        ({"labels": ["a", "b"]}, rows_of([[0], [1, 0], []], DECLARED), ["a", "b"], [[0, 1], [1, 1], [0, 0]]),
        ({"labels": ["x", "y"]}, rows_of([[0, 1], [], [1, 1]]), ["x", "y"], [[0, 1], [0, 0], [1, 1]]),
        ({"labels": ["x", "y"]}, rows_of([[0.0, 1.0]]), ["x", "y"], [[0, 1]]),
        ({"labels": ["x", "y"]}, rows_of([[False, True]]), ["x", "y"], [[0, 1]]),
    ],
)
def test_lists_of_names_and_of_numbers(tokenizer, keys, rows, names, expected):
    task = task_of(**keys).resolve(rows, WHERE)
    options = task.model_options()
    assert list(options["id2label"].values()) == names
    assert options["problem_type"] == "multi_label_classification"
    assert labels_of(task, rows, tokenizer) == expected


def test_the_order_of_a_checkpoint(tokenizer):
    task, _ = resolved(["a"], ["b"]).in_checkpoint_order(("b", "a"), chosen=False)
    assert labels_of(task, rows_of([["a"]]), tokenizer) == [[0, 1]]


@pytest.mark.parametrize(
    ("keys", "labels", "message"),
    [
        ({}, ["a", "b"], "`task.label` must name a column of lists .* holds string"),
        ({}, [[["a"]], [["b"]]], r"`task.label` must name a column of lists .* holds List\("),
        ({}, [["a"], ["a"]], "must hold at least two classes, but holds a;"),
    ],
)
def test_a_column_without_lists_of_labels_is_refused(keys, labels, message):
    with pytest.raises(DataError, match=message):
        task_of(**keys).resolve(rows_of(labels), WHERE)


def test_lists_of_numbers_need_names():
    with pytest.raises(UsageError, match=r"`task.labels` must name the labels in order, because column `label` of"):
        resolved([0, 1], [1, 1])


@pytest.mark.parametrize(
    ("keys", "train", "row", "message"),
    [
        ({}, ["a", "b"], ["a", "c"], r"row 12 of .*, in its list, is the label 'c', which is not among the 2 classes"),
        ({}, ["a", "b"], None, "row 12 of `rows.jsonl` is null; a row without labels has an empty list"),
        ({}, ["a", "b"], ["a", None], "row 12 of `rows.jsonl`, in its list, is null"),
        ({"labels": ["x", "y"]}, [0, 1], [0, 1, 1], r"row 12 .* 0 or 1 for each of the 2 labels .* but is \[0, 1, 1\]"),
        ({"labels": ["x", "y"]}, [0, 1], [0, 2], r"row 12 .* be empty or have 0 or 1 .* but is \[0, 2\]"),
    ],
)
def test_a_list_that_does_not_fit_is_named_with_its_row(tokenizer, keys, train, row, message):
    with pytest.raises(DataError, match=message):
        labels_of(resolved(train, **keys), rows_of([train, row]), tokenizer, first_row=10)


def test_splits_must_write_labels_alike():
    with pytest.raises(DataError, match="must hold lists of names, as the training split does, but holds lists of 0"):
        resolved(["a", "b"]).check_columns(rows_of([[0, 1]]).features, WHERE)


def test_metrics_over_pieces_equal_sklearn_over_the_whole():
    task = resolved(["a", "b", "c"], metrics=["accuracy", "f1_macro", "f1_micro"], threshold=0.3)
    logits, labels = torch.randn(101, 3), torch.randint(0, 2, (101, 3)).float()
    pieces = [task.predictions(logits[part], labels[part]) for part in torch.arange(101).split(13)]
    gathered = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
    predicted, true = (1 / (1 + np.exp(-logits.numpy())) > 0.3).astype(int), labels.numpy().astype(int)
    assert task.metrics(gathered) == {
        "accuracy": sklearn.metrics.accuracy_score(true, predicted),
        "f1_macro": sklearn.metrics.f1_score(true, predicted, average="macro"),
        "f1_micro": sklearn.metrics.f1_score(true, predicted, average="micro"),
    }


def test_labels_may_have_thresholds_of_their_own():
    task = resolved(["a", "b", "c"], threshold={"b": 0.9, "c": 0.1})
    logits = torch.tensor([[0.1, 0.1, -2.0], [-0.1, 3.0, -3.0]])
    predicted = task.predictions(logits, torch.zeros(2, 3))["predictions"]
    assert predicted.tolist() == [[1, 0, 1], [0, 1, 0]]
    rows = task.without_labels().readable(task.answers(logits, {}), None)
    assert [row["prediction"] for row in rows] == [["a", "c"], ["b"]]
    with pytest.raises(UsageError, match=r"`task.threshold` must name labels, but names 'd'; the labels are a, b"):
        resolved(["a", "b"], threshold={"d": 0.9})


def test_predictions_are_the_labels_above_the_threshold():
    task = resolved(["a", "b"], threshold=0.6).without_labels()
    answers = task.answers(torch.tensor([[0.0, 3.0], [0.0, 0.0], [0.5, 0.5]]), {})
    rows = task.readable(answers, None)
    assert [row["prediction"] for row in rows] == [["b"], [], ["a", "b"]]
    assert rows[0]["probabilities"] == {"a": 0.5, "b": 0.952574}
    assert task.columns == ("text",)
