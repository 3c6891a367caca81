"""Torch's variable-length attention, which needs a GPU: its call, its shapes, and the calls that it does not take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trainer.models.attention import FLAT_ATTENTION
from trainer.parallel import varlen
from trainer.parallel.flat_rows import FlatRows

LENGTHS = (9, 2, 5)


def states(dtype: torch.dtype = torch.float32, key_heads: int = 2, dim: int = 8) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    shapes = [(1, sum(LENGTHS), heads, dim) for heads in (2, key_heads, key_heads)]
    return [torch.randn(shape, generator=random).to(dtype).transpose(1, 2) for shape in shapes]


def torchs(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
    scale: float, window_size: tuple[int, int], enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Compute as torch documents it, row by row: `window_size` are the keys to the left and right; -1: all."""
    assert enable_gqa or query.shape[1] == key.shape[1]
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    lengths = cu_seq_q.diff().tolist()
    assert max_q == max_k >= max(lengths)
    outputs = []
    for rows in zip(*(x.split(lengths) for x in (query, key, value)), strict=True):
        places = torch.arange(len(rows[0]))
        distances = places[:, None] - places
        left, right = (len(places) if size < 0 else size for size in window_size)
        mask = (distances <= left) & (-distances <= right)
        row = (x.transpose(0, 1) for x in rows)
        outputs.append(F.scaled_dot_product_attention(*row, mask, scale=scale, enable_gqa=enable_gqa))
    return torch.cat(outputs, 1).transpose(0, 1)


@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize(("sliding_window", "key_heads"), [(None, 2), (3, 2), (None, 1), (3, 1)])
def test_without_dropout_its_call_is_that_of_padded_rows(monkeypatch, sliding_window, key_heads, is_causal):
    flat = FlatRows.of([2, 9, 0, 5], 12, torch.device("cpu"))
    flat = FlatRows.of(LENGTHS, 12, torch.device("cpu")) if is_causal else flat
    options: dict[str, Any] = {"sliding_window": sliding_window, "is_causal": is_causal, "scaling": 0.3}

    module = nn.Module()
    module.num_key_value_groups = 2 // key_heads

    def attend() -> list[Tensor]:
        inputs = [x.requires_grad_() for x in states(key_heads=key_heads)]
        output = ALL_ATTENTION_FUNCTIONS[FLAT_ATTENTION](module, *inputs, None, flat=flat, **options)[0]
        weights = torch.linspace(-1, 1, output.numel()).view_as(output)
        return [output, *torch.autograd.grad((output * weights).sum(), inputs)]

    expected = attend()
    monkeypatch.setattr(varlen, "obstacle", lambda *_: None)
    monkeypatch.setattr(varlen, "varlen_attn", torchs)
    torch.testing.assert_close(attend(), expected)


@pytest.mark.parametrize("key_heads", [2, 1])
def test_torch_takes_the_call(key_heads):
    flat = FlatRows.of(LENGTHS, 12, torch.device("cpu"))
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = [
            torch.empty(1, heads, 16, 8, dtype=torch.bfloat16, requires_grad=True)
            for heads in (2, key_heads, key_heads)
        ]
        output = varlen.attention(*inputs, flat.starts, 9, 0.3, False, 2)
        assert output.shape == (1, 16, 2, 8)
        assert [x.shape for x in torch.autograd.grad(output.sum(), inputs)] == [x.shape for x in inputs]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"dtype": torch.float32}, "does not compute in torch.float32"),
        ({"dim": 12}, "does not take heads of 12 and 12 dimensions"),
        ({"dim": 256}, "does not take heads of 256"),
        ({}, "the device is a cpu"),
    ],
    ids=["fp32", "no multiple of 8", "large heads", "cpu"],
)
def test_refuses_unsupported_inputs(changed: dict[str, Any], reason: str):
    assert reason in str(varlen.obstacle(*states(**{"dtype": torch.bfloat16, **changed})))


@pytest.mark.parametrize("has_groups", [True, False])
def test_heads_that_share_keys_need_a_torch_that_takes_them(monkeypatch, has_groups):
    """Torch 2.11 has no `enable_gqa`."""
    monkeypatch.setattr(varlen, "_HAS_GROUPS", has_groups)
    reason = varlen.obstacle(*states(torch.bfloat16, key_heads=1))
    assert ("the device is a cpu" if has_groups else "share keys, which needs torch 2.12") in str(reason)
    assert "the device is a cpu" in str(varlen.obstacle(*states(torch.bfloat16)))


def test_a_compiled_graph_does_not_follow_the_question_to_the_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", torch.compiler.disable(lambda _: (9, 0)))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)

    def double(x: Tensor) -> Tensor:
        return x * 2 if varlen.obstacle_of_device(torch.device("cuda")) is None else x

    compiled = torch.compile(double, fullgraph=True, backend="eager")
    assert compiled(torch.ones(())) == 2
    monkeypatch.setattr(varlen, "_HAS_WINDOW", False)
    assert "has no window" in str(varlen.obstacle_of_device(torch.device("cuda")))
