"""The shapes of what stages send, and what convolutions cost, against the model's own forward and arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForImageClassification, ResNetConfig

from tests.helpers.training import TINY_RESNET
from trainer.features.vision.resnet import RESNET
from trainer.models.families.table import layers_of
from trainer.models.stage_shapes import Crossing, CrossingShapes, multiplications


def resnet(**keys: Any) -> nn.Module:
    model: nn.Module = AutoModelForImageClassification.from_config(ResNetConfig(**{**TINY_RESNET, **keys}))
    return model.train()


def given(model: nn.Module, images: Tensor) -> list[tuple[int, ...]]:
    """The shapes of what the layers are given."""
    found: list[tuple[int, ...]] = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, args: found.append(tuple(args[0].shape)))
        for layer in layers_of(model).values()
    ]
    model(pixel_values=images)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("layer_type", ["basic", "bottleneck"])
@pytest.mark.parametrize("first", [True, False], ids=["halves at once", "halves later"])
def test_shapes_equal_the_forward_pass(layer_type, first):
    model = resnet(layer_type=layer_type, downsample_in_first_stage=first).eval()
    starts = list(layers_of(model))[1:]
    shapes = CrossingShapes(model, starts, [Crossing(hidden=True, result=False)] * len(starts), RESNET.stages)
    for size in ((64, 64), (35, 35), (17, 64), (1, 1)):
        images = torch.randn(3, 1, *size)
        assert list(shapes.of({"pixel_values": images}, num_rows=3)) == [(shape,) for shape in given(model, images)[1:]]


def test_the_count_equals_the_products_and_leaves_the_model():
    model = resnet()
    before: dict[str, Tensor] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    counts = multiplications(model, RESNET.stages.costed_row(model.config))
    assert counts["resnet.embedder.embedder.convolution"] == 49 * 8 * 112**2
    assert counts["resnet.encoder.stages.1.layers.0.shortcut.convolution"] == 8 * 16 * 28**2
    assert counts["resnet.encoder.stages.1.layers.1"] == 2 * 9 * 16 * 16 * 28**2
    assert counts["classifier.1"] == 16 * 2
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
