"""Images through pipeline stages: a ViT is cut between its layers, a ResNet is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.ranks import RankPools
from tests.helpers.training import TINY_RESNET, Curve, build_tiny, tiny_recipe, train_tiny
from tests.parity.cases import assert_same_curve
from trainer.errors import UsageError
from trainer.recipe.schema import Recipe


def recipe_of(stages: int, **keys: Any) -> Recipe:
    return tiny_recipe(
        task={"type": "image_classification"},
        parallel={"pipeline": {"stages": stages}},
        training={"micro_batch_size": 3},
        **keys,
    )


def train(stages: int) -> Curve:
    return train_tiny(recipe_of(stages))


def test_a_vit_in_stages_is_one_process(ranks: RankPools):
    """Over several epochs, each of which ends in a batch of two rows: fewer than there are microbatches."""
    expected = train(1)
    assert len(expected.losses) == 20
    for curve in ranks(2).run(train, 2):
        assert_same_curve(curve, expected)


def build_resnet() -> str:
    with pytest.raises(UsageError) as error:
        build_tiny(recipe_of(2, model={"config": TINY_RESNET}))
    return str(error.value)


def test_a_resnet_in_stages_is_refused_with_what_can(ranks: RankPools):
    for message in ranks(2).run(build_resnet):
        assert "`parallel.pipeline.stages` is above 1, but the family resnet cannot be cut" in message
        able = message.rpartition("the families that can are ")[2].split(", ")
        assert {"bert", "vit"} <= set(able)
        assert "resnet" not in able
