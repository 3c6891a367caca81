from __future__ import annotations

from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from scipy import stats

from trainer.base.errors import DataError
from trainer.recipe.schema import SequenceRegression
from trainer.tasks.registry import build_task
from trainer.tasks.types import EvaluatedSplit

WHERE = "`rows.jsonl`"


def task_of(**keys):
    return build_task(SequenceRegression(type="sequence_regression", text="text", **keys))


def encode(labels, tokenizer):
    rows = datasets.Dataset.from_dict({"text": ["a"] * len(labels), "label": labels})
    return task_of().resolve(rows, WHERE).encode(rows, tokenizer, 16, WHERE, 0)["labels"]


def test_numbers_of_any_kind(tokenizer):
    assert encode([0.5, 2.0], tokenizer) == [0.5, 2.0]
    whole = encode([3, 4], tokenizer)
    assert whole == [3.0, 4.0]
    assert all(isinstance(number, float) for number in whole)


@pytest.mark.parametrize(
    ("labels", "shown"),
    [
        ([1.0, float("nan")], "nan"),
        ([1.0, float("inf")], "inf"),
        ([1.0, 1e39], r"1e\+39"),
        ([1.0, None], "null"),
        (["1", "n/a"], "'n/a'"),
        (["1e3", "1_000"], "'1_000'"),
        (["+.5", "3,5"], "'3,5'; write it with a decimal point"),
        (["007.5", "nan"], "'nan'"),
        ([True, False], "True"),
    ],
)
def test_values_without_a_number_are_named_with_their_row(tokenizer, labels, shown):
    row = 1 if shown == "True" else 2
    message = f"column `label`, row {row} of `rows.jsonl` must be a finite number, but is {shown}$"
    with pytest.raises(DataError, match=message):
        encode(labels, tokenizer)


def test_a_missing_column():
    rows = datasets.Dataset.from_dict({"text": ["a"], "score": [1.0]})
    with pytest.raises(DataError, match=r"`task.label` names the column `label`, .* columns are `text`, `score`"):
        task_of().resolve(rows, WHERE)


def test_the_model_has_one_output():
    assert task_of().model_options() == {"num_labels": 1, "problem_type": "regression"}


def test_the_loss_is_a_sum_in_float32():
    task = task_of()
    logits, labels = torch.tensor([[1.0], [3.0]], dtype=torch.bfloat16), torch.tensor([0.0, 1.0])
    loss = task.loss_sum(logits, labels)
    assert loss.dtype == torch.float32
    assert loss == 1 + 4
    assert task.num_valid(labels) == 2
    assert task.num_valid(labels).dtype == torch.int64


def test_metrics_over_the_whole_split():
    task = task_of(metrics=["pearson", "spearman", "mse"])
    logits, labels = torch.randn(50, 1), torch.randn(50)
    metrics = task.metrics(task.predictions(logits, labels))
    predicted = logits.squeeze(-1).double().numpy()
    assert list(metrics) == ["pearson", "spearman", "mse"]
    assert metrics["pearson"] == stats.pearsonr(predicted, labels.double().numpy()).statistic
    assert metrics["mse"] == pytest.approx(float(((logits.squeeze(-1) - labels) ** 2).mean()), rel=1e-6)


def test_equal_texts_are_ties_of_a_rank_correlation():
    task, labels = task_of(metrics=["spearman"]), torch.tensor([1.0, 5.0, 2.0, 4.0, 3.0])
    encoded = SimpleNamespace(
        offsets=np.arange(0, 11, 2), tokens={"input_ids": np.array([7, 8, 7, 8, 7, 9, 7, 8, 5, 5])}
    )
    expected = stats.spearmanr([0.5, 0.5, 0.1, 0.5, 0.9], labels).statistic
    for noise in (0, 1e-7, -1e-7):  # rounding of the second and fourth row
        outputs = torch.tensor([0.5, 0.5 + noise, 0.1, 0.5 - noise, 0.9])[:, None]
        found = task.split_metrics(task.predictions(outputs, labels), EvaluatedSplit([], encoded, None))
        assert found["spearman"] == pytest.approx(expected)
