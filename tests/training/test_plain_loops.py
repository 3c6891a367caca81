"""The losses of whole trainings against plain loops over transformers' models, with the losses of transformers."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, AutoModelForMaskedLM, AutoModelForSequenceClassification

from tests.helpers.plain_loops import losses_of_both, mean_of_batch
from tests.helpers.training import TINY_BERT, sgd_sections, tiny_recipe, tiny_training


def assert_plain_loop(task: dict[str, Any], auto_class: Any, rate: float = 0.1, **options: Any) -> None:
    """Gradient descent on the mean that transformers computes for a padded batch of 12 rows, without dropout."""
    config = {**TINY_BERT, "initializer_range": 0.2}
    recipe = tiny_recipe(
        task=task,
        model={"config": config, "dropout": 0.0},
        training={"max_steps": 8, "micro_batch_size": 5, "max_grad_norm": None},
        **sgd_sections(learning_rate=rate),
    )
    with tiny_training(recipe) as training:
        described = AutoConfig.for_model(**config, **options, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        model = auto_class.from_config(described, attn_implementation="eager")
        losses = losses_of_both(training, model, mean_of_batch(model), rate, rel=1e-5)
        assert len(losses) == 8
        assert max(losses) - min(losses) > 0.01, "the weights change"


def test_masked_lm():
    assert_plain_loop({"type": "masked_lm", "text": "text"}, AutoModelForMaskedLM)


def test_sequence_regression():
    task = {"type": "sequence_regression", "text": "text"}
    options = {"num_labels": 1, "problem_type": "regression"}
    assert_plain_loop(task, AutoModelForSequenceClassification, rate=0.001, **options)  # its loss has no bound
