"""Trainings over tensor ranks, whose model is built in parts, against the same training on one process."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, BertModel

from tests.helpers.collectives import counted_collectives
from tests.helpers.families import CONFIGS
from tests.helpers.ranks import RankError, RankPools
from tests.helpers.training import TINY_BERT, Curve, tiny_recipe, tiny_training, train_tiny
from tests.parity.test_export import exported
from trainer.observe.meter import ModelSize
from trainer.recipe.schema import Recipe
from trainer.training.run_info import model_size

PARALLEL = [
    pytest.param(2, {"strategy": "ddp", "tensor": 2}, id="tp2"),
    pytest.param(4, {"strategy": "fsdp", "tensor": 2}, id="fsdp2-tp2", marks=pytest.mark.slow),
]


def recipe_of(folder: Path | None, **parallel: object) -> Recipe:
    model = {} if folder is None else {"config": None, "name_or_path": str(folder)}
    sgd = {"name": "sgd", "learning_rate": 1.0, "momentum": 0.0, "weight_decay": 0.0}
    return tiny_recipe(
        model=model, parallel=parallel, optimizer=sgd, training={"max_steps": 3}, schedule={"warmup": 0.0}
    )


@pytest.mark.parametrize(("num_ranks", "parallel"), PARALLEL)
@pytest.mark.parametrize("pretrained", [True, False], ids=["pretrained", "random"])
def test_it_is_the_training_of_one_process(ranks: RankPools, tmp_path, num_ranks, parallel, pretrained):
    folder = None
    if pretrained:
        folder = tmp_path
        torch.manual_seed(0)
        BertModel(AutoConfig.for_model(**TINY_BERT)).save_pretrained(folder)
    alone = train_tiny(recipe_of(folder))
    curves: list[Curve] = ranks(num_ranks).run(train_tiny, recipe_of(folder, **parallel))
    for curve in curves:
        assert curve.losses == pytest.approx(alone.losses, rel=1e-5)
        assert curve.grad_norms == pytest.approx(alone.grad_norms, rel=1e-4)
        assert curve.weights.keys() == alone.weights.keys()
        for name, tensor in alone.weights.items():
            torch.testing.assert_close(curve.weights[name], tensor, rtol=0, atol=3e-5)


def size_of(recipe: Recipe) -> ModelSize | None:
    with tiny_training(recipe) as training:
        return model_size([training.model], training.engine.placements, training.mesh)


def test_a_split_model_reports_the_size_of_the_whole_model(ranks: RankPools):
    alone = size_of(recipe_of(None))
    assert alone is not None
    assert 15_000 < alone.num_parameters < 20_000  # without embeddings
    for parallel in ({"strategy": "ddp", "tensor": 2}, {"strategy": "fsdp"}):
        assert ranks(2).run(size_of, recipe_of(None, **parallel)) == [alone, alone]


def test_frozen_weights_count_alike_under_every_cut(ranks: RankPools):
    lora = tiny_recipe(model={"config": TINY_BERT, "tokenizer": "none", "adapter": {"type": "lora", "rank": 2}})
    alone = size_of(lora)
    assert alone is not None
    assert 0 < alone.num_parameters - alone.num_frozen < alone.num_frozen / 4
    cut = {"model": lora.model.model_dump(), "parallel": {"strategy": "ddp", "tensor": 2}}
    assert ranks(2).run(size_of, tiny_recipe(**cut)) == [alone, alone]


class TestCommunication:
    """Two sums forward and two backward for each layer, whatever else the model and the step send."""

    def count(self, ranks: RankPools, sequence: bool) -> dict[str, int]:
        shallow, deep = (ranks(2).run(collectives, layers, sequence)[0] for layers in (2, 5))
        return {name: (deep[name] - shallow[name]) / 3 for name in deep if deep[name] != shallow[name]}

    def test_of_a_layer(self, ranks: RankPools):
        assert self.count(ranks, sequence=False) == {"all_reduce": 4}

    def test_of_a_layer_with_sequence_parallelism(self, ranks: RankPools):
        assert self.count(ranks, sequence=True) == {"all_gather": 4, "reduce_scatter": 4}


def collectives(layers: int, sequence: bool) -> Counter[str]:
    """Calls in one training step of a BERT with so many layers, without clipping."""
    config = {**TINY_BERT, "num_hidden_layers": layers}
    recipe = tiny_recipe(
        model={"config": config}, parallel={"tensor": 2, "sequence": sequence}, training={"max_grad_norm": None}
    )
    with tiny_training(recipe) as training, counted_collectives() as counted:
        training.steps(1)
    return counted


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [False, True])
def test_replicated_weights_of_tensor_ranks_are_equal_after_fifty_steps(ranks: RankPools, sequence):
    recipe = tiny_recipe(
        model={"dropout": 0.1}, parallel={"tensor": 2, "sequence": sequence}, training={"max_steps": 50}
    )
    one, two = (curve.digests for curve in ranks(2).run(train_tiny, recipe))
    assert one.keys() == {"", "tp 0", "cp_tp 0"}
    assert two.keys() == {"", "tp 1", "cp_tp 1"}
    assert one[""] == two[""]
    assert one["tp 0"] != two["tp 1"]


@pytest.mark.parametrize(
    ("num_ranks", "parallel"),
    [
        (2, {"tensor": 2}),
        pytest.param(4, {"strategy": "hsdp", "tensor": 2}, marks=pytest.mark.slow),
        pytest.param(4, {"strategy": "zero2", "tensor": 2}, marks=pytest.mark.slow),
    ],
)
def test_untrained_weights_are_exported_bit_for_bit(ranks: RankPools, tmp_path, num_ranks, parallel):
    ranks(num_ranks).run(export, tiny_recipe(parallel=parallel), tmp_path / "parts")
    export(tiny_recipe(), tmp_path / "whole")
    parts, whole = exported(tmp_path / "parts"), exported(tmp_path / "whole")
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], weight) for name, weight in whole.items())


def export(recipe: Recipe, folder: Path) -> None:
    with tiny_training(recipe) as training:
        training.engine.export(folder)


@pytest.mark.parametrize(
    ("model", "num_ranks", "parallel", "words"),
    [
        (TINY_BERT, 3, {"tensor": 3}, r"must divide the model's 4 attention heads, but is 3; use 1, 2 or 4"),
        (
            {**TINY_BERT, "intermediate_size": 63},
            2,
            {"tensor": 2},
            r"must divide the 63 features of bert\.encoder\.layer\.0\.intermediate\.dense, but is 2",
        ),
        (
            {"model_type": "albert", **CONFIGS["albert"]},
            2,
            {"tensor": 2, "sequence": True},
            r"family albert has no sequence parallelism",
        ),
        (
            {"model_type": "opt", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 16},
            2,
            {"tensor": 2},
            r"'opt' is in no family of models; known are albert, .*bert.*add a file to `trainer/models/families/`",
        ),
    ],
    ids=["heads", "features", "sequence", "family"],
)
def test_unsupported_splits_are_refused_by_name(ranks: RankPools, model, num_ranks, parallel, words):
    with pytest.raises(RankError, match=words):
        ranks(num_ranks).run(train_tiny, tiny_recipe(model={"config": model}, parallel=parallel))
