"""The rotary kernel in Triton's interpreter against transformers; `test_fused_rotation.py` runs it.

Triton chooses its interpreter when it is imported, so these tests need a process of their own:

    TRITON_INTERPRET=1 python -m pytest tests/features/rotations/interpreted_rotation.py
"""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaModel, ModernBertConfig, ModernBertModel

from tests.features.rotations.test_rotary import SIZES
from tests.gpu.test_rotation_gpu import MODELS, SHAPES, as_transformers, numbers
from tests.helpers.interpreting import round_as_gpus
from trainer.features.rotations.fused_rotation import FusedRotation
from trainer.features.rotations.rotary import CheapRotation

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    round_as_gpus(monkeypatch)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_is_transformers(model: str, dtype: torch.dtype, shape: str):
    as_transformers(model, shape, CPU, dtype)


@pytest.mark.parametrize("model", MODELS)
def test_with_cosines_in_fp32(model: str):
    as_transformers(model, "shared keys", CPU, torch.bfloat16, torch.float32)


def test_gradients_of_gradients():
    q, k, cos, sin, _ = numbers("Llama", SHAPES["odd sizes"], CPU, torch.float32, torch.float32)
    inputs = [x.detach().requires_grad_() for x in (q, k)]

    def rotate(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return sum(x.pow(2).sum() for x in FusedRotation.apply(q, k, cos, sin, torch.float32, False, False))

    found = torch.autograd.functional.hvp(rotate, tuple(inputs), tuple(torch.ones_like(x) for x in inputs))[1]
    of_plane = cos.square() + torch.cat(sin.chunk(2, -1)[::-1], -1).square()  # halves of one angle: 1
    for one in found:
        torch.testing.assert_close(one, 2 * torch.ones_like(one) * of_plane.unsqueeze(1))


@pytest.mark.parametrize(
    "model",
    [
        LlamaModel(LlamaConfig(**SIZES, num_key_value_heads=1)),
        ModernBertModel(ModernBertConfig(**SIZES, pad_token_id=0, eos_token_id=1)),
    ],
    ids=["Llama", "ModernBERT"],
)
def test_a_model_has_the_gradients_of_transformers(model: torch.nn.Module):
    gradients = []
    for is_cheap in (False, True):
        model.zero_grad()
        output = None
        if is_cheap:
            with CheapRotation(model):
                output = model(torch.arange(11)[None])
        else:
            output = model(torch.arange(11)[None])
        output.last_hidden_state.pow(3).sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
