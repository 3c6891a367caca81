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
from trainer.features.rotations.rotary import CheapRotation, _attend, _cheap_application

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


@pytest.mark.parametrize("heads", [(3, 3, 3), (4, 2, 2)])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_one_tensor_have_one_gradient(model: str, dtype: torch.dtype, heads: tuple[int, ...]):
    """Those of queries, keys and values as autograd joins them, bit for bit; parts of two tensors stay apart."""
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(2, 5, sum(heads) * 6, generator=generator).to(dtype).requires_grad_()
    _, _, cos, sin, _ = numbers(model, (2, 1, 1, 5, 6), CPU, dtype, dtype)
    rotate = _cheap_application(MODELS[model].apply_rotary_pos_emb)
    found, kinds = [], []

    def attend(_: object, *states: torch.Tensor) -> torch.Tensor:
        kinds.append(type(states[0].grad_fn).__name__)
        return sum((x * torch.randn(x.shape, generator=generator).to(dtype)).sum() for x in states)

    for is_joined, is_copied in ((True, False), (False, False), (True, True)):
        generator.manual_seed(2)
        q, k, v = (part.transpose(1, 2) for part in whole.view(2, 5, -1, 6).split(heads, dim=2))
        states = (*rotate(q, k, cos, sin), v.clone() if is_copied else v)
        loss = _attend(attend, None, *states) if is_joined else attend(None, *states)
        found.append(torch.autograd.grad(loss, whole)[0])
    assert kinds == ["JoinedStatesBackward", "FusedRotationBackward", "FusedRotationBackward"]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


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
