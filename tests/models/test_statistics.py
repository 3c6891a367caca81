"""Batch normalisation by running statistics: the same whatever rows are in the model together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForImageClassification, ResNetConfig

from tests.helpers.ranks import RankPools
from tests.helpers.training import TINY_RESNET, parallel_keys, tiny_recipe, tiny_training
from trainer.base.errors import UsageError
from trainer.models.describe import ModelUse, describe
from trainer.models.families.table import layers_of
from trainer.models.fill import build_model
from trainer.models.statistics import buffers_hash, fix_statistics, persistent_buffers
from trainer.models.tensor_split import split_model
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.row_groups import RowGroups
from trainer.recipe.schema import Model, Training

HEAD = "AutoModelForImageClassification"
OPTIONS = {"num_labels": 3}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ResNet with statistics that are not those of a new one."""
    folder = tmp_path_factory.mktemp("resnet")
    torch.manual_seed(0)
    model = AutoModelForImageClassification.from_config(ResNetConfig(**TINY_RESNET, num_labels=3))
    for name, buffer in model.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            buffer.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return folder


def build(folder: Path):
    return build_model(describe(Model(name_or_path=str(folder)), Training(), ModelUse(HEAD, OPTIONS)))


def hash_of(model: nn.Module) -> str | None:
    return buffers_hash([model], ParallelMesh(torch.device("cpu")))


def test_a_row_is_the_same_alone_and_among_others_and_nothing_changes(pretrained):
    built = build(pretrained)
    assert any("batch normalisations stay as they are before the training" in note for note in built.notes)
    before = hash_of(built.model)
    images = torch.randn(4, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    model = built.model.train()
    together = model(pixel_values=images).logits
    alone = torch.cat([model(pixel_values=image[None]).logits for image in images])
    torch.testing.assert_close(together, alone)
    expected = AutoModelForImageClassification.from_pretrained(pretrained).eval()(pixel_values=images).logits
    torch.testing.assert_close(together, expected)
    assert hash_of(model) == before
    layer = next(iter(layers_of(model).values()))
    assert layer.training, "only the normalisations are held back"


def test_layers_are_found_over_the_stages(pretrained):
    layers = layers_of(build(pretrained).model)
    assert [name.removeprefix("encoder.stages.") for name in layers] == [
        "0.layers.0", "0.layers.1", "1.layers.0", "1.layers.1"
    ]  # fmt: skip


def test_tensor_ranks_are_refused(pretrained):
    with pytest.raises(UsageError, match=r"`parallel.tensor` must be 1: .* does not support the family resnet"):
        split_model(build(pretrained).model, RowGroups())


@pytest.mark.parametrize(
    "module", [nn.BatchNorm2d(3, track_running_stats=False), nn.SyncBatchNorm(3)], ids=["no_statistics", "synchronised"]
)
def test_statistics_of_the_rows_are_refused(module):
    with pytest.raises(UsageError, match="normalises by the rows of a microbatch"):
        fix_statistics(nn.Sequential(module))


def test_a_model_without_any_is_left_alone():
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    assert fix_statistics(model) == []
    assert hash_of(model) is None


def with_buffers(*names: str) -> nn.Module:
    module = nn.Module()
    for name in names:
        module.register_buffer(name, torch.full((2,), float(ord(name))))
    return module


def hash_of_stages(names: list[str]) -> str | None:
    """Of a rank that holds the stage with its number."""
    mesh = ParallelMesh(torch.device("cpu"), pp=len(names))
    return buffers_hash([with_buffers(*names[mesh.rank])], mesh)


def test_stages_together_have_the_hash_of_the_whole(ranks: RankPools):
    """So that a run may go on with other stages."""
    whole = hash_of(with_buffers("a", "b", "c"))
    assert ranks(2).run(hash_of_stages, ["ab", "bc"]) == [whole, whole]
    assert ranks(2).run(hash_of_stages, ["", ""]) == [None, None]
    assert whole != hash_of(with_buffers("a", "b", "d"))


def train_and_export(source: Path, folder: Path, parallel: dict[str, Any]) -> dict[str, torch.Tensor]:
    recipe = tiny_recipe(
        task={"type": "image_classification"},
        model={"name_or_path": str(source), "config": None},
        training={"max_steps": 2, "micro_batch_size": 6},
        parallel=parallel,
    )
    with tiny_training(recipe) as training:
        training.steps(2)
        training.engine.export(folder)
        return {name: buffer.clone() for name, buffer in persistent_buffers(training.model).items()}


@pytest.mark.parametrize("parallel", [parallel_keys("fsdp", 2), {"pipeline": {"stages": 2}}], ids=["fsdp", "stages"])
def test_the_exported_folder_holds_the_statistics(ranks: RankPools, pretrained, tmp_path, parallel):
    ranks(2).run(train_and_export, pretrained, tmp_path / "model", parallel)
    model, loading = AutoModelForImageClassification.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    source = AutoModelForImageClassification.from_pretrained(pretrained)
    assert all(torch.equal(buffer, dict(model.named_buffers())[name]) for name, buffer in source.named_buffers())
    assert not torch.equal(source.classifier[1].weight, model.classifier[1].weight), "it was trained"
    train_and_export(pretrained, tmp_path / "one process", {})
    expected = AutoModelForImageClassification.from_pretrained(tmp_path / "one process")
    for name, weight in expected.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), weight)
