"""The products of experts against transformers' own forward pass of each family."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tests.features.experts.tiny_experts import build_experts
from tests.helpers.families import EXPERTS, VOCABULARY
from trainer.features.experts.counts import RowCounts
from trainer.features.experts.products import EXPERT_PRODUCTS, expert_products


def experts_of(model: nn.Module) -> nn.Module:
    return next(module for name, module in model.named_modules() if name.endswith(".experts"))


def computed(experts: nn.Module, how: str, index: Tensor) -> list[Tensor]:
    """Return the output of experts and the gradients of its inputs and weights, by one of transformers' functions."""
    random = torch.Generator().manual_seed(1)
    hidden = torch.randn(len(index), 32, generator=random).requires_grad_()
    weights = torch.rand(index.shape, generator=random).requires_grad_()
    experts.config._experts_implementation = how
    output = experts(hidden, index, weights)
    wanted = [hidden, weights, *experts.parameters()]
    total = output.square().sum() + hidden.sum() * 0.0  # without tokens, theirs uses no weight
    return [output, *torch.autograd.grad(total, wanted, materialize_grads=True)]


CHOICES = {
    "random": torch.randint(4, (11, 2), generator=torch.Generator().manual_seed(2)),
    "one expert has all": torch.full((5, 1), 2),
    "no token": torch.empty(0, 2, dtype=torch.int64),
}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("family", EXPERTS)
def test_outputs_and_gradients_are_those_of_transformers(family: str, choice: str):
    experts = experts_of(build_experts(family))
    own, theirs = (computed(experts, how, CHOICES[choice]) for how in (EXPERT_PRODUCTS, "eager"))
    torch.testing.assert_close(own, theirs, rtol=1e-5, atol=1e-6)


def test_gradients_of_weights_in_fp16_are_sums_in_fp32():
    experts = experts_of(build_experts("gpt_oss"))
    rows = torch.full((4096, 32), 8.0)
    with torch.autocast("cpu", torch.float16):
        output = expert_products(experts, rows, RowCounts(torch.tensor([4096, 0, 0, 0]), 4096, is_grouped=False))
    output.backward(torch.full_like(output, 64.0))
    assert all(parameter.grad.isfinite().all() for parameter in experts.parameters())
    assert experts.down_proj_bias.grad[0].max() == 4096 * 64.0 > torch.finfo(torch.float16).max
    assert not experts.down_proj.grad[1].any()


def test_a_token_does_not_depend_on_those_beside_it():
    experts = experts_of(build_experts("mixtral"))
    experts.config._experts_implementation = EXPERT_PRODUCTS
    index, hidden = CHOICES["random"], torch.randn(11, 32)
    weights = torch.rand(11, 2)
    whole = experts(hidden, index, weights)
    for token in range(11):
        part = slice(token, token + 1)
        torch.testing.assert_close(experts(hidden[part], index[part], weights[part]), whole[part])


@pytest.mark.parametrize("family", EXPERTS)
def test_a_model_computes_the_loss_and_the_gradients_of_transformers(family: str):
    model = build_experts(family)
    ids = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(3))
    found = {}
    for how in ("eager", EXPERT_PRODUCTS):
        model.config._experts_implementation = how
        loss = model(ids, labels=ids).loss
        found[how] = [loss, *torch.autograd.grad(loss, [*model.parameters()], materialize_grads=True)]
    torch.testing.assert_close(found[EXPERT_PRODUCTS], found["eager"], rtol=1e-4, atol=1e-6)


def test_products_have_shapes_without_values():
    with FakeTensorMode():
        experts = experts_of(build_experts("qwen3_moe"))
        output = computed(experts, EXPERT_PRODUCTS, torch.empty(11, 2, dtype=torch.int64))
    assert output[0].shape == (11, 32)


def test_the_function_is_in_the_table_of_transformers():
    assert EXPERT_PRODUCTS in ALL_EXPERTS_FUNCTIONS
