"""The rotary kernel on a GPU: the numbers of transformers, and its speed.

`pytest -rP` prints times. The functions take a device, so that the interpreter can try them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers.models.llama import modeling_llama
from transformers.models.modernbert import modeling_modernbert

from tests.gpu.test_dropout_gpu import milliseconds
from trainer.features.rotations import fused_rotation
from trainer.features.rotations.rotary import _cheap_application
from trainer.parallel import kernel_support

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

GPU = torch.device("cuda", 0)
MODELS = {"ModernBERT": modeling_modernbert, "Llama": modeling_llama}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = {  # rows, heads of queries and of keys, length, size
    "joined rows of ModernBERT": (1, 12, 12, 37, 64),
    "shared keys": (2, 6, 2, 5, 16),
    "odd sizes": (3, 5, 1, 7, 6),
    "many heads": (1, 70, 3, 2, 128),
}


def numbers(model: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, of_cos: torch.dtype) -> Any:
    """Return queries and keys as views of one tensor of a layer, cosines and sines, and gradients of both outputs."""
    rows, heads, keys, length, size = shape
    generator = torch.Generator().manual_seed(0)
    joined = torch.randn(rows, length, heads + keys, size, generator=generator).to(device, dtype)
    q, k = (part.transpose(1, 2) for part in joined.split([heads, keys], dim=2))
    angles = torch.randn(1 if rows == 1 else rows, length, size // 2, generator=generator).repeat(1, 1, 2)
    cos, sin = (turned.to(device, of_cos) for turned in (angles.cos(), angles.sin()))
    into = torch.promote_types(dtype, of_cos) if model == "Llama" else dtype
    return q, k, cos, sin, [torch.randn(x.shape, generator=generator).to(device, into) for x in (q, k)]


def rotated(rotate: Callable[..., Any], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, gradients: Any) -> list[Tensor]:
    q, k = (x.detach().requires_grad_() for x in (q, k))
    outputs = rotate(q, k, cos, sin)
    return [*outputs, *torch.autograd.grad(outputs, (q, k), gradients)]


def as_transformers(
    model: str, shape: str, device: torch.device, dtype: torch.dtype, of_cos: torch.dtype | None = None
) -> None:
    given = numbers(model, SHAPES[shape], device, dtype, of_cos or dtype)
    original = MODELS[model].apply_rotary_pos_emb
    cheap = _cheap_application(original)
    assert cheap is not None
    with mock.patch.object(fused_rotation, "launch", wraps=fused_rotation.launch) as launched:
        found = rotated(cheap, *given)
    assert launched.call_count == 2
    if model == "Llama":
        for one, other in zip(found, rotated(original, *given), strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
        return
    with mock.patch.object(kernel_support, "obstacle", return_value="the test wants the operations of torch"):
        expected = rotated(cheap, *given)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        # A processor may round a product and its sum once.
        torch.testing.assert_close(one, other, rtol=3 * torch.finfo(dtype).eps, atol=torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_is_transformers(model: str, dtype: torch.dtype, shape: str):
    as_transformers(model, shape, GPU, dtype)


@pytest.mark.parametrize("model", MODELS)
def test_with_cosines_in_fp32(model: str):
    as_transformers(model, "shared keys", GPU, torch.bfloat16, torch.float32)


@pytest.mark.parametrize("model", MODELS)
def test_times(model: str):
    given = numbers(model, (1, 12, 12, 98_304, 64), GPU, torch.bfloat16, torch.bfloat16)
    original = MODELS[model].apply_rotary_pos_emb
    cheap = _cheap_application(original)
    assert cheap is not None
    for name, rotate in {"ours": cheap, "transformers": original}.items():
        print(f"{model}, {name}: {milliseconds(lambda rotate=rotate: rotated(rotate, *given)):.3f} ms")
