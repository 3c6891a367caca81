"""Soft labels: a probability of each class."""

from __future__ import annotations

from typing import Any

import datasets
import numpy as np
import pytest
import torch

from tests.helpers.ranks import RankPools
from tests.parity.test_tasks import (
    LAYOUTS,
    assert_accumulation_changes_nothing,
    assert_layout_is_one_process,
    marks_of,
)
from trainer.base.errors import DataError
from trainer.recipe.reading.rules import contradictions
from trainer.recipe.schema import SequenceClassification
from trainer.tasks.registry import build_task

WHERE, TASK = "`rows.jsonl`", "soft_labels"
KEYS = {"type": "sequence_classification", "text": "text", "probabilities": "soft", "labels": ["a", "b", "c"]}


def task_of(**keys: Any) -> Any:
    return build_task(SequenceClassification(**{**KEYS, **keys}))


def rows_of(*values: Any) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"text": ["a text"] * len(values), "soft": list(values)})


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_that_of_torch(smoothing: float):
    logits = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    labels = torch.from_numpy(np.random.default_rng(0).dirichlet([1.0] * 3, 5)).float()
    found = task_of(label_smoothing=smoothing).loss_sum(logits, labels) / 5
    expected = torch.nn.CrossEntropyLoss(label_smoothing=smoothing)(logits, labels)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(loss, logits)[0] for loss in (found, expected)]
    torch.testing.assert_close(*gradients)


def test_metrics_take_the_most_probable_class(tokenizer: Any):
    rows = rows_of([0.2, 0.5, 0.3], [1, 0, 0], [0.1, 0.1, 0.8])
    task = task_of().resolve(rows, WHERE)
    labels = torch.from_numpy(np.stack(task.encode(rows, tokenizer, 16, WHERE, 0)["labels"]))
    logits = torch.tensor([[0.0, 2.0, 1.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    assert task.metrics(task.predictions(logits, labels))["accuracy"] == pytest.approx(2 / 3)
    assert task.model_options()["id2label"] == {0: "a", 1: "b", 2: "c"}


def test_objects_are_read_by_the_names_of_classes(tokenizer: Any):
    rows = rows_of({"c": 0.2, "a": 0.5, "b": 0.3}, {"c": 0, "a": 1, "b": 0})
    found = task_of().resolve(rows, WHERE).encode(rows, tokenizer, 16, WHERE, 0)["labels"]
    np.testing.assert_array_equal(np.stack(found), np.array([[0.5, 0.3, 0.2], [1, 0, 0]], np.float32))
    with pytest.raises(DataError, match=r"`task.labels` must name the classes of column `soft` .*, a, b, but names a"):
        task_of().resolve(rows_of({"a": 0.5, "b": 0.5}), WHERE)
    partial = rows_of({"a": 0.5, "b": 0.3, "c": 0.2}, {"a": 0.8, "b": 0.2})  # `trainer predict --top 2`
    with pytest.raises(
        DataError, match=r"row 2 of `rows.jsonl` must hold numbers from 0 to 1, but holds \[0.8, 0.2, N"
    ):
        task_of().resolve(partial, WHERE).encode(partial, tokenizer, 16, WHERE, 0)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([0.5, 0.6, 0.1], r"row 2 of `rows.jsonl` must hold probabilities with the sum 1, but their sum is 1.2"),
        ([0.5, 0.5], r"row 2 .* must have a probability for each of the 3 `task.labels`, but has 2"),
        ([1.5, -0.5, 0.0], r"row 2 .* must hold numbers from 0 to 1"),
        (None, r"row 2 .* but is null"),
    ],
)
def test_wrong_probabilities_are_refused(tokenizer: Any, value: Any, message: str):
    rows = rows_of([0.2, 0.5, 0.3], value)
    task = task_of().resolve(rows, WHERE)
    with pytest.raises(DataError, match=message):
        task.encode(rows, tokenizer, 16, WHERE, 0)


def test_contradictions():
    section = SequenceClassification(**{**KEYS, "labels": None, "class_weights": "balanced"})
    found = [one.text for one in contradictions({"task": section})]
    assert any("must name the classes in order" in text for text in found)
    assert any("applies to labels of one class" in text for text in found)


@pytest.mark.slow
def test_accumulation_on_one_process_changes_nothing():
    assert_accumulation_changes_nothing(TASK)


@pytest.mark.parametrize("layout", [pytest.param(name, marks=marks_of(name, (), ("ddp",))) for name in LAYOUTS])
def test_any_layout_is_one_process(ranks: RankPools, layout: str):
    assert_layout_is_one_process(ranks, TASK, layout)
