"""ResNet (He et al. 2016, arXiv:1512.03385)."""

from __future__ import annotations

from trainer.models.families.family import LayerStack, ModelFamily, StagePlan

_LAYERS = "encoder.stages.*.layers.*"

RESNET = ModelFamily(
    "resnet",
    layers=_LAYERS,
    tensor=None,
    stages=StagePlan((LayerStack(_LAYERS, before=("embedder",)),), changes_shape=True),
)
