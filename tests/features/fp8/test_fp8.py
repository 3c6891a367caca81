"""Products in fp8: beside torch and torchao, under every layout, and refusals."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification

from tests.helpers.ranks import RankError, RankPools
from tests.helpers.training import train_tiny
from tests.parity.cases import Tolerance
from tests.parity.test_learning import BERT, assert_any_layout_is_one_process, in_some_layouts, recipe_of
from trainer.base.errors import UsageError
from trainer.features.fp8 import products
from trainer.models.place import PlacedModel

FP8: dict[str, Any] = {"precision": "bf16", "fp8_features": 64}
_EPS = 2.0**-4  # the largest error of rounding to e4m3, relative
TOLERANCE = Tolerance(loss=_EPS / 16, grad_norm=_EPS, sgd_weights=_EPS)


def bert() -> Any:
    config = AutoConfig.for_model(**BERT, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3)
    return AutoModelForSequenceClassification.from_config(config)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_product_is_that_of_numbers_that_torch_rounds(transposed: bool):
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, 64, generator=generator).bfloat16() for shape in ((7, 5), (48,)))
    x[0, 0], x[1, 1], weight[3] = 0.0, 1e-3 * x[1, 1], 300 * weight[3]
    x.requires_grad_()
    given = (weight.t().contiguous() if transposed else weight).requires_grad_()
    output = products.linear(x, given, transposed=transposed)
    output.backward(gradient := torch.randn(output.shape, generator=generator).bfloat16())

    def rounded(matrix: Tensor, top: Tensor) -> Tensor:
        """Round as fp8 does, with the largest number between 224 and 448; a power of two changes no other bits."""
        scale = 2.0 ** torch.floor(torch.log2(448 / top.double().clamp(min=1e-12)))
        return ((matrix.double() * scale).to(torch.float8_e4m3fn).double() / scale).float()

    def by_rows(matrix: Tensor) -> Tensor:
        return rounded(matrix, matrix.abs().amax(-1, keepdim=True))

    close = {"rtol": 2**-7, "atol": 1e-3}
    expected = by_rows(x.detach()) @ by_rows(weight.detach()).t()
    torch.testing.assert_close(output.float(), expected, **close)
    of_x = by_rows(gradient) @ rounded(weight.detach(), weight.detach().abs().max())
    torch.testing.assert_close(x.grad.float(), of_x, rtol=2**-7, atol=1e-1)
    of_weight = (gradient.flatten(0, 1).t() @ x.detach().flatten(0, 1)).float()
    torch.testing.assert_close((given.grad.t() if transposed else given.grad).float(), of_weight, **close)


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
def test_products_and_gradients_are_bit_for_bit_those_of_torchao():
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    layer, x = nn.Linear(64, 48).bfloat16(), torch.randn(7, 5, 64, dtype=torch.bfloat16, requires_grad=True)
    config = replace(Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp"), emulate=True)
    converted = convert_to_float8_training(nn.Sequential(copy.deepcopy(layer)), config=config)
    found = []
    for output in (products.linear(x, layer.weight, layer.bias), converted(x)):
        output.square().sum().backward()
        found.append((output.detach(), x.grad))
        x.grad = None
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    for one, other in zip(layer.parameters(), converted.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@in_some_layouts
def test_any_layout_is_one_process(ranks: RankPools, layout: str):
    small = {"config": {**BERT, "initializer_range": 0.05}}
    sgd = {"name": "sgd", "learning_rate": 0.01}
    assert_any_layout_is_one_process(ranks, layout, {**FP8, "model": small, "optimizer": sgd}, TOLERANCE)


def test_wide_layers_only_are_chosen_and_the_note_has_their_number():
    # The matrices of attention are 64 x 64, and those of the feed-forward 64 x 96; the head and the pooler stay.
    recipe = recipe_of({**FP8, "model": {"config": {**BERT, "hidden_size": 32}}}, {})
    built = PlacedModel(bert())
    products.use_fp8(built, recipe)
    assert built.notes == ["12 of 12 linear layers multiply in fp8; the others in bf16"]
    assert type(built.model.bert.pooler.dense) is nn.Linear
    with pytest.raises(UsageError, match=r"`fp8_features` is 65, but the widest linear layer of Bert.* has 64 inputs"):
        products.use_fp8(PlacedModel(bert()), recipe.model_copy(update={"fp8_features": 65}))


def test_adapters_are_refused():
    recipe = recipe_of({**FP8, "model": {"adapter": {"type": "lora", "rank": 2}}}, {})
    with pytest.raises(UsageError, match=r"`fp8_features` is 64, but the layers of `model.adapter` have frozen"):
        products.use_fp8(PlacedModel(bert()), recipe)


def test_a_part_without_whole_blocks_is_refused(ranks: RankPools):
    recipe = recipe_of({**FP8, "model": {"config": {**BERT, "num_attention_heads": 8}}}, {"parallel": {"tensor": 8}})
    with pytest.raises(RankError, match=r"its weight on a rank is \(8, 64\), and fp8 needs multiples of 16"):
        ranks(8).run(train_tiny, recipe)


@pytest.mark.parametrize(
    ("capability", "problem"), [((8, 0), "has no products in fp8, which need compute capability 8.9"), ((9, 0), None)]
)
def test_old_gpus_are_refused(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], problem: str | None):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU")
    with pytest.raises(UsageError, match=problem) if problem else nullcontext():
        products._require(torch.device("cuda"))
