"""The loss and the gradients of classifications against transformers and torch on one process."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.training import TINY_TASKS, sgd_sections, tiny_recipe, tiny_training

WEIGHTS = torch.tensor([0.005, 0.03, 0.07])


def reference_loss(name: str, logits: Tensor, labels: Tensor) -> Tensor:
    if name == "multi_label":
        return torch.nn.BCEWithLogitsLoss()(logits, labels)
    return F.cross_entropy(logits, labels, WEIGHTS, label_smoothing=0.1)


@pytest.mark.parametrize("name", ["weighted_classification", "multi_label"])
def test_a_step_is_that_of_torch(name: str) -> None:
    tiny = TINY_TASKS[name]
    recipe = tiny_recipe(
        task=tiny.keys,
        model={**tiny.model, "dropout": 0.0},
        **sgd_sections(),
        training={"max_steps": 1, "max_grad_norm": None, "micro_batch_size": 5},
    )
    with tiny_training(recipe) as training:
        model = deepcopy(training.model)
        batch = next(iter(training.loader))
        result = training.engine.train_step(batch)
        trained = dict(training.model.named_parameters())
        outputs = [model(**microbatch.inputs) for microbatch in batch.microbatches]
        labels = torch.cat([microbatch.labels for microbatch in batch.microbatches])
        loss = reference_loss(name, torch.cat([output.logits for output in outputs]), labels)
        loss.backward()
        assert result.loss == pytest.approx(loss.item(), abs=1e-6)
        for label, parameter in model.named_parameters():
            torch.testing.assert_close(trained[label], parameter - parameter.grad, rtol=0, atol=1e-6)
        if name == "multi_label":
            first = batch.microbatches[0]
            theirs = model(**first.inputs, labels=first.labels).loss  # by `problem_type`
            sums = training.parts.task.loss_sum(outputs[0].logits, first.labels)
            torch.testing.assert_close(sums / len(first.labels), theirs, rtol=0, atol=1e-6)


def test_the_loss_of_evaluations_has_no_weights_and_no_smoothing() -> None:
    tiny = TINY_TASKS["weighted_classification"]
    with tiny_training(tiny_recipe(task=tiny.keys, model=tiny.model)) as training:
        microbatch = next(iter(training.loader)).microbatches[0]
        result = training.engine.eval_step(microbatch)
        logits = training.model.eval()(**microbatch.inputs).logits
        expected = F.cross_entropy(logits, microbatch.labels, reduction="sum")
        assert result.loss_sum == pytest.approx(expected.item(), rel=1e-6)
        assert result.num_valid == len(microbatch.labels)
