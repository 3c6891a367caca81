"""Rotary position embeddings with fewer operations backward."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    CohereConfig,
    CohereModel,
    GptOssConfig,
    GptOssModel,
    LlamaConfig,
    LlamaModel,
    ModernBertConfig,
    ModernBertModel,
)
from transformers.models.cohere import modeling_cohere
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama
from transformers.models.modernbert import modeling_modernbert

from trainer.features.rotations.rotary import CheapRotation

SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 11}


class _Fills(TorchDispatchMode):
    """The number of slices that are filled up backward."""

    number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += function is torch.ops.aten.slice_backward.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("size", [6, 5])
def test_numbers_equal_transformers(size):
    original = modeling_llama.rotate_half
    x = torch.randn(2, 3, size, generator=torch.Generator().manual_seed(0), requires_grad=True)
    weights = torch.arange(1.0, size + 1)
    expected = original(x)
    (gradient,) = torch.autograd.grad((expected * weights).sum(), x)
    with CheapRotation(LlamaModel(LlamaConfig(**SIZES))):
        assert modeling_llama.rotate_half is not original
        found = modeling_llama.rotate_half(x)
    assert modeling_llama.rotate_half is original
    assert torch.equal(found, expected)
    assert torch.equal(torch.autograd.grad((found * weights).sum(), x)[0], gradient)


def test_a_model_fills_no_slices():
    model = LlamaModel(LlamaConfig(**SIZES))
    gradients, fills = [], []
    for context in (nullcontext(), CheapRotation(model)):
        model.zero_grad()
        with _Fills() as counted:
            with context:
                output = model(torch.arange(11)[None])
            output.last_hidden_state.pow(2).sum().backward()
        fills.append(counted.number)
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert fills[1] == 0 < fills[0]
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_another_rotation_stays():
    original = modeling_cohere.rotate_half
    with CheapRotation(CohereModel(CohereConfig(**SIZES, num_key_value_heads=2))):
        assert modeling_cohere.rotate_half is original


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rotations_in_fp32_equal_those_of_modernbert(dtype: torch.dtype):
    original = modeling_modernbert.apply_rotary_pos_emb
    generator = torch.Generator().manual_seed(0)
    q, k, weights = (torch.randn(2, 3, 5, 8, generator=generator).to(dtype) for _ in range(3))
    angles = torch.randn(2, 5, 8, generator=generator)

    def rotated(rotate, *states):
        states = [state.clone().requires_grad_() for state in states]
        outputs = rotate(*states, angles.cos(), angles.sin())
        gradients = torch.autograd.grad(outputs, states, [weights.to(states[0].dtype)] * 2)
        return [tensor.to(dtype) for tensor in (*outputs, *gradients)]

    with CheapRotation(ModernBertModel(ModernBertConfig(**SIZES, pad_token_id=0, eos_token_id=1))):
        cheap = modeling_modernbert.apply_rotary_pos_emb
    assert cheap is not original
    assert modeling_modernbert.apply_rotary_pos_emb is original
    # On states in fp32, where transformers rounds neither gradient of the two copies of a state.
    expected, found = rotated(original, q.float(), k.float()), rotated(cheap, q, k)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_rotations_that_round_products_stay_where_no_kernel_runs():
    original = modeling_llama.apply_rotary_pos_emb
    q, k, angles = torch.randn(1, 2, 5, 8), torch.randn(1, 1, 5, 8), torch.randn(1, 5, 8)
    with CheapRotation(LlamaModel(LlamaConfig(**SIZES))):
        found = modeling_llama.apply_rotary_pos_emb(q, k, angles.cos(), angles.sin())
    expected = original(q, k, angles.cos(), angles.sin())
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_rotations_with_other_cosines_stay():
    original = modeling_gpt_oss.apply_rotary_pos_emb
    with CheapRotation(GptOssModel(GptOssConfig(**SIZES, num_key_value_heads=2, num_local_experts=2))):
        assert modeling_gpt_oss.apply_rotary_pos_emb is original
