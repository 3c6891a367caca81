"""CUDA graphs of passes have the losses of eager passes, and the host launches one graph for a microbatch."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.helpers.training import tiny_recipe, tiny_training
from trainer.recipe.schema import Recipe

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

STEPS = 10


def train(recipe: Recipe) -> tuple[list[float], int]:
    """Return the losses of some steps, and the kernels that the host launched in the last one."""
    with tiny_training(recipe, device="cuda") as training:
        losses = [result.loss for result in training.steps(STEPS - 1)]
        (batch,) = [batch for batch, _ in zip(training.loader, range(1), strict=False)]
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            losses.append(training.engine.train_step(batch).loss)
    launches = sum(event.count for event in profiled.key_averages() if event.key.startswith(("cudaLaunch", "cuLaunch")))
    return losses, launches


@pytest.mark.parametrize("keyed", [True, False], ids=["keyed", "torch"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_graphs_have_the_losses_of_eager_passes(precision: str, keyed: bool):
    recipe = tiny_recipe(
        model={"dropout": 0.1},
        data={"pad_to": 32},
        training={"micro_batch_size": 4, "layout_invariant_dropout": keyed},
        precision=precision,
    )
    eager, eager_launches = train(recipe)
    graphed, launches = train(recipe.model_copy(update={"cuda_graphs": True}))
    print(f"{precision}: {eager_launches} launches without graphs, {launches} with them")
    assert launches < eager_launches / 2
    assert graphed == pytest.approx(eager, rel=1e-4 if precision == "fp32" else 1e-2)
