"""Vision Transformer (Dosovitskiy et al. 2021, arXiv:2010.11929)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from trainer.models.families.family import LayerStack, ModelFamily, StagePlan, TensorPlan

_LAYERS = "layers.*"


def _positions(config: Any, inputs: Mapping[str, Tensor]) -> int:
    size = config.patch_size
    rows, columns = (size, size) if isinstance(size, int) else size
    height, width = inputs["pixel_values"].shape[2:]
    return int((height // rows) * (width // columns) + 1)  # 1 for the class token


VIT = ModelFamily(
    "vit",
    layers=_LAYERS,
    tensor=TensorPlan(
        columns={f"{_LAYERS}.(attention.(q_proj|k_proj|v_proj)|mlp.fc1)": 1},
        rows=(f"{_LAYERS}.attention.o_proj", f"{_LAYERS}.mlp.fc2"),
        attention=(f"{_LAYERS}.attention",),
        shared_inputs=(f"{_LAYERS}.attention",),
        whole=("embeddings", "embeddings.patch_embeddings.projection", "pooler.dense", "classifier"),
        sequence_parallel=True,
        context_parallel=True,
    ),
    stages=StagePlan((LayerStack(_LAYERS, before=("embeddings",)),), positions=_positions),
)
