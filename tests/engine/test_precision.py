"""What is computed in which type."""

from __future__ import annotations

import pytest
import torch

from trainer.base.errors import UsageError
from trainer.engine.precision import cast_forward, set_precision


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_products_are_computed_in_the_type_and_weights_stay(precision, dtype):
    layer = torch.nn.Linear(4, 4)
    cast_forward(layer, precision, torch.device("cpu"))
    output = layer(torch.ones(2, 4))
    assert output.dtype == dtype
    output.float().sum().backward()
    assert layer.weight.dtype == layer.weight.grad.dtype == torch.float32


def test_nothing_outside_of_the_model_is_cast():
    layer = torch.nn.Linear(4, 4)
    cast_forward(layer, "bf16", torch.device("cpu"))
    layer(torch.ones(2, 4))
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def test_a_gpu_without_bf16_is_refused(monkeypatch):
    """As one older than Ampere, where torch would emulate it, slowly."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(UsageError, match="`precision` is bf16, which Tesla T4 does not compute in; use fp16 or fp32"):
        cast_forward(torch.nn.Linear(4, 4), "bf16", torch.device("cuda"))


def test_tf32_is_off_unless_the_recipe_allows_it(monkeypatch):
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    try:
        for allowed in (True, False):
            set_precision(allowed, torch.device("cuda"))
            assert torch.backends.cuda.matmul.allow_tf32 is torch.backends.cudnn.allow_tf32 is allowed
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
    with pytest.raises(UsageError, match="`tf32` is true, but cpu has no TF32; set it to false"):
        set_precision(True, torch.device("cpu"))


@pytest.mark.parametrize(
    "name",
    ["allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction", "allow_fp16_accumulation"],
)
def test_products_of_16_bits_are_summed_in_fp32(name):
    products = torch.backends.cuda.matmul
    before = getattr(products, name)
    try:
        setattr(products, name, True)
        set_precision(False, torch.device("cpu"))
        assert getattr(products, name) is False
    finally:
        setattr(products, name, before)


def test_a_device_without_autocast_is_refused():
    with pytest.raises(UsageError, match="`precision` is fp16, which meta does not compute in; use fp32"):
        cast_forward(torch.nn.Linear(4, 4), "fp16", torch.device("meta"))
