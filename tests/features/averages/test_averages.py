"""Averages of the weights: those of torch's `swa_utils`, resumed in another layout, refused by name."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import AutoModelForSequenceClassification

from tests.helpers.ranks import RankPools
from tests.helpers.training import MemorySource, build_tiny, tiny_recipe, tiny_training, weights_of, whole_state
from trainer.recipe.schema import Recipe

DECAY = 0.8


def recipe_of(**parallel: Any) -> Recipe:
    training = {"ema_decay": DECAY, "micro_batch_size": 3}
    return tiny_recipe(model={"dropout": 0.1}, training=training, optimizer={"learning_rate": 0.01}, parallel=parallel)


def test_checkpoints_evaluations_and_exports_have_the_averages_of_torch(tmp_path: Path):
    training = build_tiny(recipe_of())
    reference = AveragedModel(training.model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))  # type: ignore[no-untyped-call]
    batches = list(islice(training.loader, 4))
    for batch in batches:
        training.engine.train_step(batch)
        reference.update_parameters(training.model)
        trained = {name: parameter.detach().clone() for name, parameter in training.model.named_parameters()}
        training.engine.eval_step(batch.microbatches[0])  # shows the averages, for this step
        assert any(not torch.equal(one, trained[name]) for name, one in training.model.named_parameters()) or (
            batch is batches[0]
        )
        training.engine._hide()
        assert all(torch.equal(one, trained[name]) for name, one in training.model.named_parameters())
    expected = dict(reference.module.named_parameters())
    for name, weight in weights_of(training.engine, training.mesh).items():
        torch.testing.assert_close(weight, expected[name].detach(), atol=1e-7, rtol=1e-6, msg=name)
    training.engine.export(tmp_path)
    written = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    for name, weight in written.named_parameters():
        torch.testing.assert_close(weight.detach(), expected[name].detach(), atol=1e-7, rtol=1e-6, msg=name)
    assert any("averages of the weights" in note for note in training.engine.notes())


def test_a_bad_step_changes_no_average():
    training = build_tiny(recipe_of())
    training.steps(2)
    before = weights_of(training.engine, training.mesh)
    parameter = training.model.get_parameter("classifier.weight")
    hook = parameter.register_hook(lambda gradient: gradient * torch.inf)
    assert not training.steps(1)[0].is_finite
    hook.remove()
    after = weights_of(training.engine, training.mesh)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_first_good_step_sets_the_average():
    training = build_tiny(recipe_of())
    hook = training.model.get_parameter("classifier.weight").register_hook(lambda gradient: gradient * torch.inf)
    assert not training.steps(1)[0].is_finite
    hook.remove()
    training.steps(1)
    trained = {name: parameter.detach().clone() for name, parameter in training.model.named_parameters()}
    for name, weight in weights_of(training.engine, training.mesh).items():
        torch.testing.assert_close(weight, trained[name], atol=0, rtol=0, msg=name)


def continued(recipe: Recipe, saved: MemorySource) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses of two steps after a state of two steps, and the weights of a checkpoint."""
    with tiny_training(recipe, start_sample=24) as training:
        training.engine.load_state(saved, 2)
        losses = [result.loss for result in training.steps(2)]
        return losses, weights_of(training.engine, training.mesh)


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("zero2", marks=pytest.mark.slow)])
def test_a_run_resumes_in_another_layout(ranks: RankPools, strategy: str):
    whole = build_tiny(recipe_of())
    whole.steps(2)
    saved = whole_state(whole.engine, whole.mesh)
    expected = continued(recipe_of(), saved)
    for losses, weights in ranks(2).run(continued, recipe_of(strategy=strategy), saved):
        assert losses == pytest.approx(expected[0], rel=1e-5)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[1][name], atol=1e-3, rtol=0, msg=name)
