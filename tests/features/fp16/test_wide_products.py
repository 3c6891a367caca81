"""Gradients of weights in fp16, which a sum over rows may not overflow."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tests.helpers.families import build
from trainer.engine.precision import cast_forward
from trainer.features.fp16.wide_products import add_bias, linear
from trainer.parallel.dropout import DropoutKeys
from trainer.parallel.tensor.low_rank import LowRank, attach


def _low_rank() -> nn.Module:
    layer = nn.Linear(4, 4).requires_grad_(False)
    attach(layer, LowRank(torch.randn(2, 4), torch.randn(4, 2), 1.0, nn.Identity()))
    return layer


class Experts(nn.Module):
    """Matrices that no linear layer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.Parameter(torch.randn(2, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return sum(F.linear(x, matrix) for matrix in self.matrices)


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 0.5


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 4),
    "linear without bias": lambda: nn.Linear(4, 3, bias=False),
    "transposed": lambda: Conv1D(3, 4),
    "convolution": lambda: nn.Conv1d(4, 3, 2, stride=2),
    "padded convolution": lambda: nn.Conv1d(4, 4, 3, padding="same", groups=2),
    "mirrored convolution": lambda: nn.Conv2d(1, 4, 2, padding=1, padding_mode="reflect"),
    "norm": lambda: nn.LayerNorm(4),
    "group norm": lambda: nn.GroupNorm(2, 4),
    "low rank": _low_rank,
    "experts": Experts,
    "derived": lambda: Scaled(4, 4),
}


def _gradients(layer: nn.Module, x: Tensor, of_output: float) -> dict[str, Tensor]:
    layer.zero_grad()
    x = x.clone().requires_grad_()
    output = layer(x)
    output.backward(torch.full_like(output, of_output))
    assert x.grad is not None
    found = {name: parameter.grad.clone() for name, parameter in layer.named_parameters() if parameter.requires_grad}
    return {**found, "x": x.grad}


@pytest.mark.parametrize("name", LAYERS)
def test_copies_of_a_row_have_its_gradient_times_their_number(name):
    torch.manual_seed(0)
    layer = nn.Sequential(LAYERS[name]())
    shape = (1, 1, 4, 4) if name == "mirrored convolution" else (1, 4, 4)
    row = torch.randn(shape).half()  # as another product leaves it
    cast_forward(layer, "fp16", torch.device("cpu"))
    one, many = (_gradients(layer, rows, 2.0**13) for rows in (row, row.expand(256, *shape[1:])))
    assert all(gradient.isfinite().all() for gradient in one.values())
    assert many.pop("x")[:1].equal(one.pop("x"))
    assert max(gradient.abs().max() for gradient in many.values()) > 2**17
    for parameter, gradient in many.items():
        torch.testing.assert_close(gradient, one[parameter] * 256, rtol=1e-3, atol=2.0)


def test_a_bias_that_is_added_after_a_sum():
    bias = torch.zeros(3, requires_grad=True)
    x = torch.zeros(2, 256, 3).half()
    add_bias(x, bias).backward(torch.full((2, 256, 3), 2.0**13).half())
    assert bias.grad.tolist() == [2.0**22] * 3


def test_outside_of_fp16_the_functions_are_torchs():
    x, weight = torch.randn(3, 4), torch.randn(2, 4, requires_grad=True)
    assert linear(x, weight).grad_fn.name() == torch.nn.functional.linear(x, weight).grad_fn.name()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(x, weight).dtype == torch.bfloat16


def test_positions_that_all_rows_share_are_multiplied_in_fp32():
    """DeBERTa repeats the product of its relative positions for each row."""
    keys = DropoutKeys(0)
    model = build("deberta-v2", "AutoModelForSequenceClassification", 0.0, keys)
    cast_forward(model, "fp16", torch.device("cpu"))
    attention = model.deberta.encoder.layer[0].attention.self
    states, positions = torch.randn(1, 3, 32), torch.randn(8, 32)
    mask = torch.ones(1, 1, 3, 3)
    found = []
    for number in (1, 256):
        attention.zero_grad()
        rows = [tensor.expand(number, *tensor.shape[1:]) for tensor in (states, mask)]
        with torch.autocast("cpu", dtype=torch.float16):
            output, _ = attention(*rows, rel_embeddings=positions)
        output.backward(torch.full_like(output, 2.0**9) * torch.linspace(-1, 1, 32))
        found.append({name: parameter.grad for name, parameter in attention.named_parameters()})
    for name, gradient in found[1].items():
        expected = found[0][name] * 256
        torch.testing.assert_close(gradient, expected, rtol=1e-2, atol=1e-2 * expected.abs().max().item())
    assert found[1]["key_proj.weight"].abs().max() > 2**17
