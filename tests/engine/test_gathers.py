"""Weights of matrix products travel in the type of the products: fewer bytes, and the same training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import nn

from tests.helpers.collectives import counted_collectives
from tests.helpers.ranks import RankPools
from tests.helpers.training import TINY_BERT, Curve, tiny_recipe, tiny_training, train_tiny
from tests.parity.cases import Case
from trainer.engine import fsdp_internals, sharded
from trainer.engine.precision import COMPUTE_DTYPES
from trainer.engine.products import rounded_by_autocast
from trainer.recipe.schema import Recipe
from trainer.tools.plan.ledger import Ledger


def train(recipe: Recipe, rounded: bool) -> tuple[Curve, int]:
    """Train three steps, and return the curve and the bytes of gathered weights."""
    names = rounded_by_autocast if rounded else lambda model: set()
    types = COMPUTE_DTYPES if rounded else dict.fromkeys(COMPUTE_DTYPES, torch.float32)
    with (
        mock.patch("trainer.engine.sharded.rounded_by_autocast", names),
        mock.patch("trainer.features.deepspeed.engine.COMPUTE_DTYPES", types),
        Ledger() as ledger,
    ):
        curve = train_tiny(recipe, num_steps=3)
    traffic = ledger.totals.traffic.items()
    return curve, sum(
        of.num_bytes for call, of in traffic if call.operation == "_allgather_base_" and call.phase != "optimizer"
    )


FURTHER = [
    ("fsdp", "fp16", "selective"),
    ("zero3", "bf16", "none"),
    ("zero1", "fp16", "none"),
    ("zero2", "bf16", "none"),
]


@pytest.mark.parametrize(
    ("strategy", "precision", "how"),
    [
        ("fsdp", "bf16", "none"),
        pytest.param("zero3", "fp16", "selective", marks=pytest.mark.slow),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in FURTHER),
    ],
)
def test_no_digit_changes(ranks: RankPools, strategy: str, precision: str, how: str):
    recipe = Case(strategy, 2, False, precision, how, 0.1).recipe()
    found, received = ranks(2).run(train, recipe, True)[0]
    expected, whole = ranks(2).run(train, recipe, False)[0]
    assert found.losses == expected.losses
    assert found.grad_norms == expected.grad_norms
    for name, weight in expected.weights.items():
        assert torch.equal(found.weights[name], weight), name
    assert 0 < received < 0.75 * whole  # a quarter of this small model is its embeddings and norms


def test_only_parameters_of_products_are_rounded():
    config = transformers.RobertaConfig(**{**TINY_BERT, "model_type": "roberta"})
    model = transformers.RobertaForMaskedLM(config)  # tied weights; the bias belongs to two modules
    rounded = rounded_by_autocast(model)
    assert rounded == {
        f"{name}.{kind}"
        for name, module in model.named_modules()
        for kind in ("weight", "bias")
        if isinstance(module, nn.Linear) and name != "lm_head.decoder"
    }
    assert not {"lm_head.bias", "roberta.embeddings.word_embeddings.weight"} & rounded
    assert "lm_head.dense.bias" in rounded


def train_in_bf16(recipe: Recipe, together: bool) -> tuple[Curve, dict[str, torch.dtype]]:
    """Train three steps with weights in bf16; return the curve, and the types in which autograd adds gradients."""
    found: dict[str, torch.dtype] = {}

    def note(parameters: Sequence[Any]) -> None:
        stored = [one for one in parameters if one.sharded_param.dtype == torch.bfloat16]
        assert all(one.param_dtype is None for one in stored), "a gather first copies the shard"
        gradients = {one._param_fqn: one._unsharded_param.grad for one in parameters}
        found.update((name, gradient.dtype) for name, gradient in gradients.items() if gradient is not None)
        return_to_fp32(parameters)

    return_to_fp32, once = fsdp_internals._return_to_fp32, sharded.used_once if together else lambda loss: set()
    with mock.patch.object(fsdp_internals, "_return_to_fp32", note), mock.patch.object(sharded, "used_once", once):
        return train_tiny(recipe, num_steps=3), found


@pytest.mark.parametrize("model_type", ["bert", pytest.param("albert", marks=pytest.mark.slow)])
def test_only_gradients_of_several_uses_are_added_in_fp32(ranks: RankPools, model_type: str):
    """Weights in bf16 with one use return their gradients together, and no digit changes. ALBERT repeats one layer."""
    recipe = Case("fsdp", 2, True, "bf16", "none", 0.1, model_type=model_type, weights="bf16_compensated").recipe()
    (found, types), (expected, alone) = (ranks(2).run(train_in_bf16, recipe, together)[0] for together in (True, False))
    assert found.losses == expected.losses
    assert found.grad_norms == expected.grad_norms
    for name, weight in expected.weights.items():
        assert torch.equal(found.weights[name], weight), name
    assert set(alone.values()) == {torch.float32}
    in_bf16 = {name for name, dtype in types.items() if dtype == torch.bfloat16}
    products = {name for name in types if "embeddings" not in name and "LayerNorm" not in name}
    repeated = {name for name in products if "albert_layers" in name}
    assert in_bf16 == products - repeated


def gathers_before_products(recipe: Recipe) -> list[int]:
    """Return the number of gathers that have begun when each layer of a BERT computes its first product."""
    found: list[int] = []
    with tiny_training(recipe) as training:
        batch = next(iter(training.loader))
        training.engine.train_step(batch)
        with counted_collectives() as counted:
            for layer in training.model.bert.encoder.layer:
                query = layer.attention.self.query
                query.register_forward_pre_hook(lambda *_: found.append(counted["all_gather"]))
            training.engine.eval_step(batch.microbatches[0])
    return found


def test_the_gather_of_the_next_layer_begins_before_the_products_of_a_layer(ranks: RankPools):
    config = {**TINY_BERT, "num_hidden_layers": 4}
    recipe = tiny_recipe(model={"config": config, "tokenizer": "none"}, parallel={"strategy": "fsdp"})
    # The group of the rest, then the layers up to the next one.
    assert ranks(2).run(gathers_before_products, recipe) == [[3, 4, 5, 5]] * 2
