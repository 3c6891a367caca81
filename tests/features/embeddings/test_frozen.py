"""Parameters without a part in an embedding, such as BERT's pooler, are frozen; they are saved, loaded and exported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModel

from tests.helpers.ranks import RankPools
from tests.helpers.training import tiny_recipe, tiny_training, whole_state

POOLER = "pooler.dense.bias"
Tensors = dict[str, Tensor]


def save_and_load(strategy: str, folder: Path) -> tuple[Tensors, Tensors]:
    """Return the state after two steps with another pooler, and the state of an engine that loaded it."""
    recipe = tiny_recipe(task={"type": "embedding"}, parallel={"strategy": strategy}, training={"micro_batch_size": 3})
    with tiny_training(recipe) as training:
        training.steps(2)
        training.engine.export(folder)
        saved = whole_state(training.engine, training.mesh)
    saved.tensors[f"model.{POOLER}"] += 1
    with tiny_training(recipe) as again:
        again.engine.load_state(saved, 2)
        loaded = whole_state(again.engine, again.mesh)
        assert again.steps(1)[0].is_finite
    return saved.tensors, loaded.tensors


@pytest.mark.parametrize("strategy", ["fsdp", "zero2", "zero3"])
@pytest.mark.slow
def test_they_are_saved_loaded_and_exported(ranks: RankPools, tmp_path: Path, strategy: str):
    for saved, loaded in ranks(2).run(save_and_load, strategy, tmp_path):
        assert saved.keys() == loaded.keys()
        assert not [name for name in saved if not torch.equal(saved[name], loaded[name])]
        assert not [name for name in saved if name.startswith(f"optimizer.{POOLER}")]
    written = AutoModel.from_pretrained(tmp_path).state_dict()
    assert torch.equal(written[POOLER] + 1, saved[f"model.{POOLER}"])
    assert torch.equal(
        written["encoder.layer.0.output.dense.weight"], saved["model.encoder.layer.0.output.dense.weight"]
    )
