"""Trainings over tensor ranks, whose model is built in parts, against the same training on one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, BertModel

from tests.helpers.ranks import RankPools
from tests.helpers.training import TINY_BERT, Curve, tiny_recipe, tiny_training, train_tiny
from trainer.observe.meter import ModelSize
from trainer.recipe.schema import Recipe
from trainer.run_info import model_size

PARALLEL = [
    pytest.param(2, {"strategy": "ddp", "tensor": 2}, id="tp2"),
    pytest.param(4, {"strategy": "fsdp", "tensor": 2}, id="fsdp2-tp2"),
]


def recipe_of(folder: Path | None, **parallel: object) -> Recipe:
    model = {} if folder is None else {"config": None, "name_or_path": str(folder)}
    sgd = {"name": "sgd", "learning_rate": 1.0, "momentum": 0.0, "weight_decay": 0.0}
    return tiny_recipe(
        model=model, parallel=parallel, optimizer=sgd, training={"max_steps": 3}, schedule={"warmup": 0.0}
    )


@pytest.mark.parametrize(("num_ranks", "parallel"), PARALLEL)
@pytest.mark.parametrize("pretrained", [True, False], ids=["pretrained", "random"])
def test_it_is_the_training_of_one_process(ranks: RankPools, tmp_path, num_ranks, parallel, pretrained):
    folder = None
    if pretrained:
        folder = tmp_path
        torch.manual_seed(0)
        BertModel(AutoConfig.for_model(**TINY_BERT)).save_pretrained(folder)
    alone = train_tiny(recipe_of(folder))
    curves: list[Curve] = ranks(num_ranks).run(train_tiny, recipe_of(folder, **parallel))
    for curve in curves:
        assert curve.losses == pytest.approx(alone.losses, rel=1e-5)
        assert curve.grad_norms == pytest.approx(alone.grad_norms, rel=1e-4)
        assert curve.weights.keys() == alone.weights.keys()
        for name, tensor in alone.weights.items():
            torch.testing.assert_close(curve.weights[name], tensor, rtol=0, atol=3e-5)


def size_of(recipe: Recipe) -> ModelSize | None:
    with tiny_training(recipe) as training:
        return model_size(training.model, training.engine.placements)


def test_the_size_of_a_cut_model_is_that_of_the_whole_one(ranks: RankPools):
    alone = size_of(recipe_of(None))
    assert alone is not None
    assert 15_000 < alone.num_parameters < 20_000  # without embeddings
    for parallel in ({"strategy": "ddp", "tensor": 2}, {"strategy": "fsdp"}):
        assert ranks(2).run(size_of, recipe_of(None, **parallel)) == [alone, alone]
