"""The losses of whole trainings against plain loops over transformers' models, with the losses of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForMaskedLM, AutoModelForSequenceClassification

from tests.helpers.training import NUM_CLASSES, TINY_BERT, sgd_sections, tiny_recipe, tiny_training

CASES = {
    "multi_label": (
        {"multi_label": True},
        AutoModelForSequenceClassification,
        {"num_labels": NUM_CLASSES, "problem_type": "multi_label_classification"},
    ),
    "masked_lm": ({"type": "masked_lm", "text": "text"}, AutoModelForMaskedLM, {}),
    "sequence_regression": (
        {"type": "sequence_regression", "text": "text"},
        AutoModelForSequenceClassification,
        {"num_labels": 1, "problem_type": "regression"},
    ),
}


def stacked(tensors: list[torch.Tensor], fill: int) -> torch.Tensor:
    if tensors[0].dim() == 1:
        return torch.cat(tensors)
    width = max(tensor.shape[1] for tensor in tensors)
    return torch.cat([F.pad(tensor, (0, width - tensor.shape[1]), value=fill) for tensor in tensors])


@pytest.mark.parametrize("name", CASES)
def test_losses_equal_a_plain_loop(name: str):
    """Gradient descent on the mean that transformers computes for a padded batch of 12 rows, without dropout."""
    task, auto_class, options = CASES[name]
    rate = 0.001 if name == "sequence_regression" else 0.1  # its loss has no bound
    config = {**TINY_BERT, "initializer_range": 0.2}
    recipe = tiny_recipe(
        task=task,
        model={"config": config, "dropout": 0.0},
        training={"max_steps": 8, "micro_batch_size": 5, "max_grad_norm": None},
        **sgd_sections(learning_rate=rate),
    )
    with tiny_training(recipe) as training:
        described = AutoConfig.for_model(**config, **options, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        model: Any = auto_class.from_config(described, attn_implementation="eager")
        model.load_state_dict(training.model.state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        losses = []
        for batch in training.loader:
            parts = [(m.inputs, m.labels) for m in batch.microbatches]
            inputs = {key: stacked([part[key] for part, _ in parts], 0) for key in ("input_ids", "attention_mask")}
            labels = stacked([labels for _, labels in parts], -100)
            loss = model(**inputs, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            assert training.engine.train_step(batch).loss == pytest.approx(losses[-1], rel=1e-5)
        assert len(losses) == 8
        assert max(losses) - min(losses) > 0.01, "the weights change"
