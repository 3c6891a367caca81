"""Experts in 4 and 8 bits: against bitsandbytes' own functions of each matrix, and gradients over them."""

from __future__ import annotations

import copy
from typing import Any

import bitsandbytes.functional as bnb
import pytest
import torch
from torch import Tensor, nn

from tests.features.experts.tiny_experts import build_experts
from tests.helpers.families import EXPERTS, VOCABULARY
from trainer.models.adapters import reach_note
from trainer.models.freezing import adapt
from trainer.models.registered_forms import encoded_weights, form_of
from trainer.parallel.stored_in_parts import weights_in_parts
from trainer.recipe.schema import Model


def by_bitsandbytes(matrix: Tensor, kind: str) -> Tensor:
    if kind == "int8":
        codes, scales, _ = bnb.int8_vectorwise_quant(matrix.half())
        return bnb.int8_vectorwise_dequant(codes, scales)
    codes, state = bnb.quantize_4bit(matrix, compress_statistics=kind == "nf4", quant_type="nf4")
    return bnb.dequantize_4bit(codes, state)


def recipe_of(family: str, kind: str | None, **adapter: Any) -> Model:
    adapter = {"type": "lora", "rank": 2, "targets": ["o_proj"], **adapter}
    config = {"model_type": family, **EXPERTS[family]}
    return Model.model_validate({"config": config, "tokenizer": "none", "adapter": adapter, "quantization": kind})


@pytest.mark.parametrize("kind", ["nf4", "nf4_single", "int8"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_model_computes_with_the_matrices_of_bitsandbytes(family: str, kind: str):
    plain: Any = build_experts(family)
    model = copy.deepcopy(plain)
    recipe = recipe_of(family, kind, target_parameters="all-experts")
    adapt(model, recipe, seed=0)
    adapt(plain, recipe_of(family, None, target_parameters="all-experts"), seed=0)
    stored = weights_in_parts(model)
    assert {name for name in stored if "experts" in name} == {
        f"model.layers.{layer}.mlp.experts.{key}" for layer in range(2) for key in ("gate_up_proj", "down_proj")
    }
    for name, weight in stored.items():
        exact = plain.get_parameter(name).detach()
        expected = torch.stack([by_bitsandbytes(m.contiguous(), kind) for m in exact.reshape(-1, *exact.shape[-2:])])
        expected = expected.view(exact.shape)
        assert torch.equal(weight.decoded(torch.float32), expected)
        assert torch.equal(weight.rounded(exact), expected)
        tensors = {f"{name}.{part}": tensor.float() for part, tensor in weight.named_parameters()}
        (encoded,) = encoded_weights(tensors).values()
        assert torch.equal(encoded.decoded(exact.shape, tensors.__getitem__), expected)
        plain.get_parameter(name).data = expected
    for one in (plain, model):
        for name, parameter in one.named_parameters():
            if name.endswith(".B"):
                nn.init.constant_(parameter, 0.1)
    ids = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(3))
    found = []
    for one in (plain, model):
        one.config._experts_implementation = "expert_products"
        loss = one(input_ids=ids, labels=ids).loss
        trained = {name: parameter for name, parameter in one.named_parameters() if parameter.requires_grad}
        found.append([loss, *torch.autograd.grad(loss, list(trained.values()))])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-7)
    assert "leaves them whole" not in reach_note(model, form_of(recipe))


def test_shapes_of_quantised_experts_are_known_on_meta():
    with torch.device("meta"):
        model = build_experts("mixtral")
    real = build_experts("mixtral")
    for one in (model, real):
        adapt(one, recipe_of("mixtral", "nf4"), seed=0)
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in real.named_parameters()}
    codes = real.get_parameter("model.layers.0.mlp.experts.down_proj.codes")
    assert codes.dtype == torch.uint8
    assert codes.numel() * 2 == 4 * 32 * 64


def test_experts_that_are_trained_whole_or_of_another_family_stay_exact():
    model = build_experts("mixtral")
    adapt(model, recipe_of("mixtral", "nf4", modules_to_save=["layers.1.mlp.experts"]), seed=0)
    stored = weights_in_parts(model)
    assert "model.layers.0.mlp.experts.down_proj" in stored
    assert "model.layers.1.mlp.experts.down_proj" not in stored
