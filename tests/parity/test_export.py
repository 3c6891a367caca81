"""The exported Hugging Face folder (fp32 weights) is the same for every strategy, also from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageClassification, AutoModelForMaskedLM, AutoModelForSequenceClassification

from tests.helpers.ranks import RankError, RankPools
from tests.helpers.training import (
    RANK_STRATEGIES,
    TINY_BERT,
    TINY_RESNET,
    parallel_keys,
    tiny_recipe,
    tiny_training,
    weights_of,
)
from tests.parity.cases import GLOBAL_BATCH_SIZE, TOLERANCES
from trainer.checkpoint.counters import Progress
from trainer.checkpoint.disk import Disk
from trainer.checkpoint.saving import Saved, Saver
from trainer.checkpoint.store import CheckpointStore
from trainer.models.save import save_configuration
from trainer.recipe.schema import Recipe
from trainer.use.export.exporting import export

STEPS = 3
MIXED = {"precision": "bf16", "activation_checkpointing": "full"}


def marks_of(strategy: str) -> Any:
    """Return the marks of a strategy: `make test` runs each way to hold the weights once."""
    if strategy == "zero1":  # holds the weights as ZeRO-2 does
        return pytest.mark.nightly
    return () if strategy in ("fsdp", "zero3") else pytest.mark.slow


def recipe_of(strategy: str, world_size: int, **sections: object) -> Recipe:
    return tiny_recipe(
        training={"max_steps": STEPS, "micro_batch_size": GLOBAL_BATCH_SIZE // world_size},
        parallel=parallel_keys(strategy, world_size),
        **sections,
    )


def train_and_export(recipe: Recipe, folder: Path) -> dict[str, torch.Tensor]:
    """Train and export. Return the weights of the training state."""
    with tiny_training(recipe) as training:
        training.steps(STEPS)
        training.engine.export(folder)
        return weights_of(training.engine, training.mesh)


def exported(folder: Path) -> dict[str, torch.Tensor]:
    model, loading = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return dict(model.named_parameters())


@pytest.mark.parametrize(
    ("strategy", "extra"),
    [
        *(pytest.param(name, {}, marks=marks_of(name)) for name in RANK_STRATEGIES),
        *(
            pytest.param(name, MIXED, marks=pytest.mark.slow if name == "zero3" else pytest.mark.nightly)
            for name in RANK_STRATEGIES
        ),
    ],
    ids=str,
)
def test_the_folder_holds_the_trained_weights(ranks: RankPools, tmp_path, strategy, extra):
    trained = ranks(2).run(train_and_export, recipe_of(strategy, 2, **extra), tmp_path / "model")[0]
    weights = exported(tmp_path / "model")
    assert weights.keys() == trained.keys()
    assert all(weight.dtype == torch.float32 for weight in weights.values())
    assert all(torch.equal(weights[name], weight) for name, weight in trained.items())

    one_process = train_and_export(recipe_of("ddp", 1, **extra), tmp_path / "reference")
    tolerance = TOLERANCES[extra.get("precision", "fp32")].sgd_weights
    assert all((weights[name] - weight).abs().max() <= tolerance for name, weight in one_process.items())


def train_save_and_export(recipe: Recipe, folder: Path) -> None:
    """Train, export the model with the engine, and save a checkpoint."""
    with tiny_training(recipe) as training:
        training.steps(STEPS)
        training.engine.export(folder / "model")
        files = {}
        if training.mesh.rank == 0:
            save_configuration(training.model, folder / "configuration")
            files = {file.name: file.read_bytes() for file in (folder / "configuration").iterdir()}
        store = CheckpointStore(folder, 1)
        saver = Saver([Disk(store, training.mesh, files)], training.engine, training.mesh, Saved({}))
        training.mesh.on_rank_zero(store.open)
        saver.progress = Progress(STEPS)
        saver.save()
        saver.finish()


MASKED_LM = {"type": "masked_lm", "text": "text"}
RESNET = {"task": {"type": "image_classification"}, "model": {"config": TINY_RESNET}}
FOUR_LAYERS = {"model": {"config": {**TINY_BERT, "num_hidden_layers": 4}}}
IN_BF16 = {"precision": "bf16", "weights": "bf16_stochastic"}
INTERLEAVED = {"stages": 2, "stages_per_rank": 2, "schedule": "interleaved_1f1b"}
LAYOUTS = [
    *[pytest.param(2, {}, parallel_keys(name, 2), id=name, marks=marks_of(name)) for name in RANK_STRATEGIES],
    pytest.param(2, {}, {"tensor": 2}, id="tensor parts, with padding"),
    pytest.param(2, {}, {"pipeline": {"stages": 2}}, id="stages"),
    pytest.param(2, RESNET, {"strategy": "fsdp"}, id="buffers"),
    pytest.param(2, IN_BF16, {"pipeline": {"stages": 2}}, id="weights in bf16"),
    pytest.param(2, FOUR_LAYERS, {"pipeline": INTERLEAVED}, id="several stages a rank", marks=pytest.mark.slow),
    pytest.param(4, {}, {"strategy": "fsdp", "tensor": 2}, id="fsdp x tensor", marks=pytest.mark.nightly),
    pytest.param(4, {}, {"strategy": "zero3", "tensor": 2}, id="zero3 x tensor", marks=pytest.mark.slow),
    pytest.param(4, {}, {"tensor": 2, "pipeline": {"stages": 2}}, id="stages x tensor", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("world_size", "sections", "parallel"), LAYOUTS)
def test_a_checkpoint_of_any_layout_gives_the_same_folder(ranks: RankPools, tmp_path, world_size, sections, parallel):
    recipe = tiny_recipe(
        **({"task": MASKED_LM} | sections),  # with tied weights in the first and last layer
        training={"max_steps": STEPS, "micro_batch_size": 3},
        parallel=parallel,
    )
    ranks(world_size).run(train_save_and_export, recipe, tmp_path)
    export(tmp_path, tmp_path / "out", "bf16" if sections is IN_BF16 else "fp32")
    (tmp_path / "out" / "README.md").unlink()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors"}
    for path in (tmp_path / "out").iterdir():
        assert path.read_bytes() == (tmp_path / "model" / path.name).read_bytes()
    auto_class = AutoModelForImageClassification if sections is RESNET else AutoModelForMaskedLM
    _, loading = auto_class.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


@pytest.mark.parametrize(
    "strategy", ["ddp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fsdp", "zero3"))]
)
def test_a_folder_that_cannot_be_written_is_an_error_on_every_rank(ranks: RankPools, tmp_path, strategy):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RankError) as error:
        ranks(2).run(train_and_export, recipe_of(strategy, 2), tmp_path / "file")
    assert "rank 0" in str(error.value)
    assert "rank 1" in str(error.value)
