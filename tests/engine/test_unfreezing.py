"""`model.unfreeze_at_step`: a frozen training before the step, new moments at it, and checkpoints on both sides."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.ranks import RankPools
from tests.helpers.training import (
    MemorySource,
    build_tiny,
    check_model,
    tiny_recipe,
    tiny_training,
    weights_of,
    whole_state,
)
from trainer.base.errors import RecipeError, UsageError
from trainer.recipe.plan import plan_run
from trainer.recipe.reading.loading import load_recipe
from trainer.recipe.schema import Recipe

FREEZE, STEP, RATE = ["embeddings", "layer.0"], 2, 0.01


def recipe_of(unfreeze: int | None = STEP, strategy: str = "ddp", **keys: Any) -> Recipe:
    model = {"dropout": 0.1, "freeze": FREEZE, "unfreeze_at_step": unfreeze}
    return tiny_recipe(
        model=model,
        training={"micro_batch_size": 3},
        optimizer={"learning_rate": RATE},
        schedule={"name": "constant"},
        parallel={"strategy": strategy},
        **keys,
    )


def is_late(name: str) -> bool:
    return "embeddings" in name or "layer.0" in name


def test_weights_stay_frozen_until_the_step_and_moments_begin_there():
    frozen, training = build_tiny(recipe_of(unfreeze=None)), build_tiny(recipe_of())
    assert frozen.steps(STEP) == training.steps(STEP)  # losses and gradient norms
    before, expected = weights_of(training.engine, training.mesh), weights_of(frozen.engine, frozen.mesh)
    assert all(torch.equal(before[name], weight) for name, weight in expected.items())
    saved = whole_state(training.engine, training.mesh)
    assert not [name for name in saved.tensors if name.startswith("optimizer.") and is_late(name)]
    training.engine.train_step(list(training.loader)[STEP])
    after = weights_of(training.engine, training.mesh)
    for name in filter(is_late, before):
        # Adam's first update is the learning rate where the gradient is far above epsilon; that of key biases is not.
        if name.endswith("weight"):
            assert (after[name] - before[name]).abs().max() == pytest.approx(RATE, rel=1e-2), name
    counts = whole_state(training.engine, training.mesh).tensors
    assert {float(counts[name]) for name in counts if name.endswith(".step") and is_late(name)} == {1.0}
    assert float(counts["optimizer.classifier.weight.step"]) == STEP + 1


def continued(recipe: Recipe, saved: MemorySource, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    with tiny_training(recipe, start_sample=12 * steps) as training:
        training.engine.load_state(saved, steps)
        losses = [result.loss for result in training.steps(2)]
        return losses, weights_of(training.engine, training.mesh)


@pytest.mark.parametrize("steps", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_run_resumes_in_another_layout(ranks: RankPools, steps: int):
    whole = build_tiny(recipe_of())
    whole.steps(steps)
    saved = whole_state(whole.engine, whole.mesh)
    expected = continued(recipe_of(), saved, steps)
    for losses, weights in ranks(2).run(continued, recipe_of(strategy="fsdp"), saved, steps):
        assert losses == pytest.approx(expected[0], rel=1e-5)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[1][name], atol=1e-3, rtol=0, msg=name)


def test_it_needs_weights_to_freeze_and_an_earlier_step_than_the_last():
    with pytest.raises(RecipeError, match=r"`model.unfreeze_at_step` has no effect without `model.freeze`"):
        load_recipe("bert_sample", ["model.unfreeze_at_step=5"])
    keys = ["model.unfreeze_at_step=5", 'model.freeze=["embeddings"]', "training.max_steps=5"]
    with pytest.raises(RecipeError, match=r"`model.unfreeze_at_step` must be below `training.max_steps` 5"):
        load_recipe("bert_sample", keys)
    with pytest.raises(UsageError, match=r"`model.freeze` must leave a parameter to train"):
        build_tiny(tiny_recipe(model={"freeze": ["*"], "unfreeze_at_step": 1}))
    (note,) = check_model(plan_run(recipe_of(data={"max_length": 16}), 1)).notes
    assert note.endswith("parameters of `model.freeze` are trained after step 2")
