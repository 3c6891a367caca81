"""Tensor ranks that share one GPU over gloo have the training curve of one process on that GPU."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.ranks import RankPools
from tests.helpers.training import Curve, tiny_recipe, tiny_training
from tests.parity.cases import assert_same_curve
from trainer.recipe.schema import Recipe

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def train_on_gpu(recipe: Recipe) -> Curve:
    with tiny_training(recipe, device="cuda") as training:
        results = training.steps(training.total_steps)
    return Curve([result.loss for result in results], [result.grad_norm for result in results])


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("degree", [2, 4])
def test_tensor_ranks_on_one_gpu(ranks: RankPools, degree, sequence):
    expected = train_on_gpu(tiny_recipe(model={"dropout": 0.1}))
    recipe = tiny_recipe(model={"dropout": 0.1}, parallel={"tensor": degree, "sequence": sequence})
    for curve in ranks(degree).run(train_on_gpu, recipe):
        assert_same_curve(curve, expected)
