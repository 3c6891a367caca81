"""Images through pipeline stages: a ViT is cut between its layers, a ResNet between its residual layers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest

from tests.features.vision.tiny_tasks import tiny_images
from tests.helpers.ranks import RankPools
from tests.helpers.training import TINY_RESNET, TINY_TASKS, TINY_VIT, Curve, tiny_recipe, train_tiny
from tests.parity.cases import assert_same_curve
from tests.tools.plan.test_truth import assert_planned_peak


def train(config: dict[str, Any], size: int, stages: int) -> Curve:
    """Over several epochs, each of which ends in a batch of two rows: fewer than there are microbatches."""
    images = replace(TINY_TASKS["image_classification"], split=partial(tiny_images, size=size))
    recipe = tiny_recipe(
        task={"type": "image_classification"},
        model={"config": config},
        parallel={"pipeline": {"stages": stages}},
        training={"micro_batch_size": 3},
    )
    with mock.patch.dict(TINY_TASKS, image_classification=images):
        return train_tiny(recipe)


@pytest.mark.parametrize(
    ("config", "size"),
    [pytest.param(TINY_VIT, 16, marks=pytest.mark.slow), (TINY_RESNET, 19)],
    ids=["vit", "a resnet of images of odd size"],
)
def test_stages_are_one_process(ranks: RankPools, config, size):
    expected = train(config, size, 1)
    assert len(expected.losses) == 20
    for curve in ranks(2).run(train, config, size, 2):
        assert_same_curve(curve, expected)


@pytest.mark.slow
def test_the_planned_peak():
    assert_planned_peak({"task": TINY_TASKS["image_classification"].keys, "model": {"config": TINY_VIT}})
