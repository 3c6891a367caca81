"""Every strategy writes the same Hugging Face folder: the weights that it trained, in fp32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests.helpers.ranks import RankError, RankPools
from tests.helpers.training import RANK_STRATEGIES, parallel_keys, tiny_recipe, tiny_training, weights_of
from tests.parity.cases import GLOBAL_BATCH_SIZE, TOLERANCES
from trainer.recipe.schema import Recipe

STEPS = 3
EXTRAS = [
    {},
    pytest.param({"precision": "bf16"}, marks=pytest.mark.slow),
    pytest.param({"activation_checkpointing": "full"}, marks=pytest.mark.slow),
]


def recipe_of(strategy: str, world_size: int, **sections: object) -> Recipe:
    return tiny_recipe(
        training={"max_steps": STEPS, "micro_batch_size": GLOBAL_BATCH_SIZE // world_size},
        parallel=parallel_keys(strategy, world_size),
        **sections,
    )


def train_and_export(recipe: Recipe, folder: Path) -> dict[str, torch.Tensor]:
    """The weights of the training state."""
    with tiny_training(recipe) as training:
        training.steps(STEPS)
        training.engine.export(folder)
        return weights_of(training.engine, training.mesh)


def exported(folder: Path) -> dict[str, torch.Tensor]:
    model, loading = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return dict(model.named_parameters())


@pytest.mark.parametrize("extra", EXTRAS, ids=str)
@pytest.mark.parametrize("strategy", RANK_STRATEGIES)
def test_the_folder_holds_what_was_trained(ranks: RankPools, tmp_path, strategy, extra):
    trained = ranks(2).run(train_and_export, recipe_of(strategy, 2, **extra), tmp_path / "model")[0]
    weights = exported(tmp_path / "model")
    assert weights.keys() == trained.keys()
    assert all(weight.dtype == torch.float32 for weight in weights.values())
    assert all(torch.equal(weights[name], weight) for name, weight in trained.items())

    one_process = train_and_export(recipe_of("ddp", 1, **extra), tmp_path / "reference")
    tolerance = TOLERANCES[extra.get("precision", "fp32")].sgd_weights
    assert all((weights[name] - weight).abs().max() <= tolerance for name, weight in one_process.items())


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow), "zero3"])
def test_a_folder_that_cannot_be_written_is_an_error_on_every_rank(ranks: RankPools, tmp_path, strategy):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RankError) as error:
        ranks(2).run(train_and_export, recipe_of(strategy, 2), tmp_path / "file")
    assert "rank 0" in str(error.value)
    assert "rank 1" in str(error.value)
