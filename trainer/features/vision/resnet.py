"""ResNet (He et al. 2016, arXiv:1512.03385)."""

from __future__ import annotations

from typing import Any

from trainer.models.families.family import LayerStack, ModelFamily, StagePlan

_LAYERS = "encoder.stages.*.layers.*"


def _image(config: Any) -> tuple[int, int, int]:
    """Return the shape of an image of the usual size for ResNets, by which layers are assigned to stages."""
    return config.num_channels, 224, 224


RESNET = ModelFamily(
    "resnet",
    layers=_LAYERS,
    tensor=None,
    stages=StagePlan((LayerStack(_LAYERS, before=("embedder",)),), costed_row=_image),
)
