from __future__ import annotations

import math
import warnings
from typing import get_args

import numpy as np
import pytest
import sklearn.metrics
from scipy import stats

from trainer.recipe.schema import Recipe
from trainer.tasks.metrics.table import METRICS, greater_is_better, merit

LABELS = np.random.default_rng(0).integers(0, 3, 400)
PREDICTIONS = np.where(np.random.default_rng(1).random(400) < 0.6, LABELS, np.random.default_rng(2).integers(0, 3, 400))
TARGETS = np.random.default_rng(3).normal(size=400).astype(np.float32)
NUMBERS = (TARGETS + np.random.default_rng(4).normal(size=400)).astype(np.float32)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("accuracy", sklearn.metrics.accuracy_score(LABELS, PREDICTIONS)),
        ("f1_macro", sklearn.metrics.f1_score(LABELS, PREDICTIONS, average="macro")),
        ("matthews", sklearn.metrics.matthews_corrcoef(LABELS, PREDICTIONS)),
    ],
)
def test_classes_against_sklearn(name, expected):
    assert METRICS[name].compute(PREDICTIONS, LABELS) == expected


def test_f1_is_of_class_one():
    predictions, labels = PREDICTIONS % 2, LABELS % 2
    assert METRICS["f1"].compute(predictions, labels) == sklearn.metrics.f1_score(labels, predictions)
    assert METRICS["f1"].compute(labels, predictions) != sklearn.metrics.f1_score(1 - labels, 1 - predictions)


def test_numbers_against_scipy():
    predictions, labels = NUMBERS.astype(float), TARGETS.astype(float)
    assert METRICS["pearson"].compute(NUMBERS, TARGETS) == stats.pearsonr(predictions, labels).statistic
    assert METRICS["spearman"].compute(NUMBERS, TARGETS) == stats.spearmanr(predictions, labels).statistic
    assert METRICS["mse"].compute(NUMBERS, TARGETS) == sklearn.metrics.mean_squared_error(labels, predictions)


@pytest.mark.parametrize("name", ["pearson", "spearman"])
@pytest.mark.parametrize(
    ("predictions", "labels"),
    [(np.ones(4), np.arange(4.0)), (np.arange(4.0), np.ones(4)), (np.ones(1), np.ones(1))],
)
def test_a_correlation_with_a_constant_is_zero_without_a_warning(name, predictions, labels):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert METRICS[name].compute(predictions, labels) == 0.0


def test_nearly_constant_predictions_are_not_warned_of():
    predictions = (1 + np.arange(5) * 1e-7).astype(np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert METRICS["pearson"].compute(predictions, np.arange(5.0)) == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("name", ["f1", "f1_macro", "matthews"])
def test_predicting_one_class_only_is_zero_without_a_warning(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        value = METRICS[name].compute(np.zeros(4, int), np.array([1, 1, 1, 1]))
    assert value == 0.0


@pytest.mark.parametrize("section", get_args(Recipe.model_fields["task"].annotation))
def test_every_metric_that_a_recipe_can_name_is_in_the_table(section):
    (literal,) = get_args(section.model_fields["metrics"].annotation)
    assert set(get_args(literal)) <= set(METRICS)


def test_which_way_is_better():
    lower = {"loss", "mse", "perplexity", "rejected_logps", "kl", "ece", "brier"}
    assert {name for name in [*METRICS, "loss"] if not greater_is_better(name)} == lower


def test_evaluations_in_order_of_merit():
    ordered = [(math.nan, 0.1), (0.7, math.nan), (0.7, 2.0), (0.7, 1.0), (0.9, 3.0)]
    found = [merit("accuracy", {"accuracy": value, "loss": loss}) for value, loss in ordered]
    assert found == sorted(set(found))
    assert merit("mse", {"mse": 1.0, "loss": 1.0}) > merit("mse", {"mse": 2.0, "loss": 0.5})


@pytest.mark.parametrize("name", ["pearson", "spearman"])
def test_correlations_of_ties_against_scipy(name):
    predictions, labels = np.repeat(NUMBERS[:20], 3), np.tile(TARGETS[:12], 5).round(0)
    assert METRICS[name].compute(predictions, labels) == getattr(stats, f"{name}r")(predictions, labels).statistic


def test_metrics_of_tokens():
    sums, counts = np.array([2, 0, 3]), np.array([4, 0, 3])
    assert METRICS["token_accuracy"].compute(sums, counts) == 5 / 7
    assert METRICS["perplexity"].compute(sums.astype(float), counts) == pytest.approx(np.exp(5 / 7))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert METRICS["perplexity"].compute(np.array([1e6]), np.array([1])) == np.inf
