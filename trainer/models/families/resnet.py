"""ResNet (He et al. 2016, arXiv:1512.03385)."""

from __future__ import annotations

from trainer.models.families.family import ModelFamily

RESNET = ModelFamily("resnet", layers="encoder.stages.*.layers.*", tensor=None)
