"""Shared experts beside the messages of others: the order of the work, and the digits of the training."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.features.experts.test_layouts import Layout
from tests.features.experts.tiny_experts import build_experts
from tests.helpers.ranks import RankPools
from tests.helpers.training import Curve, train_tiny
from tests.parity.cases import TOLERANCES, assert_same_curve
from trainer.features.experts import blocks
from trainer.features.experts.axis import divide_experts
from trainer.features.experts.products import use_products
from trainer.parallel.placement import whole


def calls_of(model_type: str) -> list[str]:
    """Return the order of messages with rows and of shared experts, in both passes of the last block."""
    model: Any = build_experts(model_type)
    use_products(model)
    divide_experts(model, dist.group.WORLD, whole(model))
    block = model.base_model.layers[-1].mlp
    shared = block.shared_expert if model_type == "qwen2_moe" else block.shared_experts
    calls: list[str] = []
    send = dist.all_to_all_single

    class Work:
        def __init__(self, work: Any) -> None:
            self._work = work

        def wait(self) -> None:
            calls.append("wait")
            self._work.wait()

    def sent(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        if not async_op:  # the counts
            return send(*args, **kwargs)
        calls.append("send")
        return Work(send(*args, async_op=True, **kwargs))

    shared.register_forward_hook(lambda *_: calls.append("shared"))
    shared.register_full_backward_hook(lambda *_: calls.append("gradient of shared"))
    with mock.patch.object(dist, "all_to_all_single", sent):
        output = block(torch.randn(2, 3, 32, requires_grad=True))
        calls.append("backward")
        output.square().sum().backward()
    return calls


@pytest.mark.parametrize("model_type", ["deepseek_v3", "qwen2_moe"])
def test_messages_are_under_way_beside_shared_experts(ranks: RankPools, model_type: str):
    for calls in ranks(2).run(calls_of, model_type):
        assert calls == [
            *("send", "shared", "wait", "send", "wait", "backward"),
            *("send", "wait", "send", "gradient of shared", "wait"),
        ]


def train(layout: Layout, overlaps: bool) -> Curve:
    with mock.patch.object(blocks, "_FORWARDS", blocks._FORWARDS if overlaps else {}):
        return train_tiny(layout.recipe(), num_steps=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        Layout(2, 2, model_type="deepseek_v2"),
        pytest.param(Layout(2, 2, model_type="qwen2_moe"), marks=pytest.mark.nightly),
        pytest.param(
            Layout(4, 2, "fsdp", "deepseek_v3", {"activation_checkpointing": "full"}, micro_batch_size=3),
            marks=pytest.mark.nightly,
        ),
    ],
    ids=str,
)
def test_no_digit_of_deepseek_changes(ranks: RankPools, layout: Layout):
    found, expected = (ranks(layout.ranks).run(train, layout, overlaps)[0] for overlaps in (True, False))
    if layout.model_type == "qwen2_moe":  # gradients are added in another order
        assert found.losses[0] == expected.losses[0]
        assert_same_curve(found, expected, TOLERANCES["fp32"])
        return
    assert found.losses == expected.losses
    assert found.grad_norms == expected.grad_norms
    for name, weight in expected.weights.items():
        assert torch.equal(found.weights[name], weight), name
