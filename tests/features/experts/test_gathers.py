"""FSDP gathers the matrices of experts in the type of the products: fewer bytes, and the same training."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn

from tests.features.experts.test_layouts import Layout
from tests.features.experts.tiny_experts import build_experts
from tests.helpers.ranks import RankPools
from tests.helpers.training import Curve, train_tiny
from trainer.engine.products import rounded_by_autocast
from trainer.tools.plan.ledger import Ledger


def without_experts(model: nn.Module) -> set[str]:
    return {name for name in rounded_by_autocast(model) if ".experts." not in name}


def train(layout: Layout, rounded: bool) -> tuple[Curve, int]:
    """Train three steps, and return the curve and the bytes of gathered weights."""
    names = rounded_by_autocast if rounded else without_experts
    with mock.patch("trainer.engine.sharded.rounded_by_autocast", names), Ledger() as ledger:
        curve = train_tiny(layout.recipe(), num_steps=3)
    traffic = ledger.totals.traffic.items()
    return curve, sum(of.num_bytes for call, of in traffic if call.operation == "_allgather_base_")


BF16, FP16 = {"precision": "bf16"}, {"precision": "fp16"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        Layout(2, 1, "fsdp", sections=BF16),
        pytest.param(Layout(2, 1, "fsdp", "gpt_oss", FP16, micro_batch_size=3), marks=pytest.mark.nightly),
        pytest.param(Layout(4, 2, "fsdp", sections=FP16), marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_no_digit_changes(ranks: RankPools, layout: Layout):
    found, received = ranks(layout.ranks).run(train, layout, True)[0]
    expected, whole = ranks(layout.ranks).run(train, layout, False)[0]
    assert found.losses == expected.losses
    assert found.grad_norms == expected.grad_norms
    for name, weight in expected.weights.items():
        assert torch.equal(found.weights[name], weight), name
    assert 0 < received < 0.75 * whole


def test_matrices_and_no_biases_are_rounded():
    rounded = rounded_by_autocast(build_experts("gpt_oss"))
    own = {name for name in rounded if ".0.mlp.experts." in name}
    assert own == {f"model.layers.0.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")}
