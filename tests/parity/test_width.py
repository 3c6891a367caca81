"""The gradient norm of an embedding of BERT's size (30522 x 768) is the same with every engine."""

from __future__ import annotations

from functools import cache

import pytest

from tests.helpers.ranks import RankPools
from tests.helpers.training import TINY_BERT, sgd_sections, tiny_recipe, tiny_training
from trainer.recipe.schema import Recipe

WIDE = {**TINY_BERT, "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 1, "tie_word_embeddings": True}


def recipe_of(world_size: int, strategy: str) -> Recipe:
    return tiny_recipe(
        task={"type": "masked_lm", "text": "text"},
        model={"config": WIDE},
        training={"micro_batch_size": 12 // world_size, "max_grad_norm": 0.1},
        parallel={"strategy": strategy},
        **sgd_sections(1e-2),
    )


def norm(recipe: Recipe) -> float:
    with tiny_training(recipe) as training:
        return training.steps(1)[0].grad_norm


@cache
def of_one_process() -> float:
    return norm(recipe_of(1, "ddp"))


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("zero2", marks=pytest.mark.nightly), "zero3"])
@pytest.mark.slow
def test_its_norm(ranks: RankPools, strategy):
    for measured in ranks(2).run(norm, recipe_of(2, strategy)):
        assert measured == pytest.approx(of_one_process(), rel=1e-6)
