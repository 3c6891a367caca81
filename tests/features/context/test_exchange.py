"""The exchange of positions for heads, forward and backward, against one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import gradcheck

from tests.helpers.ranks import RankPools
from trainer.features.context.exchange import heads_to_positions, positions_to_heads
from trainer.parallel.communication import join_sequence, split_sequence


def heads_exchanged(x: Tensor) -> Tensor:
    """Positions attend to all others: each rank computes one head, and none does so in the gradient of another."""
    group, size = dist.group.WORLD, dist.get_world_size()
    heads = torch.stack([x * (head + 1) for head in range(size)], 1)  # [batch, heads, positions, width]
    part = positions_to_heads(split_sequence(heads, group, 2), group, size)
    mixed = heads_to_positions(part.cumsum(2).sin(), group, size)
    return join_sequence(mixed.sum(1), group, 1, x.shape[1])


def check_gradient() -> None:
    x = torch.randn(2, 6, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64).requires_grad_()
    whole = sum((x * (head + 1)).cumsum(1).sin() for head in range(dist.get_world_size()))
    torch.testing.assert_close(heads_exchanged(x), whole)
    assert gradcheck(heads_exchanged, x)


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_gradients_of_exchanged_heads(ranks: RankPools, world_size: int):
    ranks(world_size).run(check_gradient)
