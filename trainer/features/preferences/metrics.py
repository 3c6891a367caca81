"""Metrics of values of the chosen answers and of the rejected ones."""

from __future__ import annotations

from trainer.tasks.metrics.metric import Metric, Values


def _mean(values: Values) -> float:
    return float(values.mean()) if len(values) else 0.0


REWARD_ACCURACY = Metric(lambda chosen, rejected: _mean(chosen > rejected))
REWARD_MARGIN = Metric(lambda chosen, rejected: _mean(chosen) - _mean(rejected))
CHOSEN_LOGPS = Metric(lambda own, _: _mean(own))
REJECTED_LOGPS = Metric(lambda own, _: _mean(own), greater_is_better=False)
KL = Metric(lambda own, _: _mean(own), greater_is_better=False)
