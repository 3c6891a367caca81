"""Sums of gradients begin while the backward pass goes on, in one order on all ranks."""

from __future__ import annotations

import time
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.helpers.ranks import RankPools
from trainer.parallel import gradients
from trainer.parallel.gradients import OverlappedSums
from trainer.parallel.pipeline.busy_clock import BusyClock

PASSES, LAYERS, WIDTH = 2, 4, 7
LAYER_BYTES = 4 * WIDTH * (WIDTH + 1)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    model.register_parameter("unused", nn.Parameter(torch.ones(3)))  # the last bucket
    return model


def backward(model: nn.Module, rows: Tensor) -> None:
    model(rows).square().sum().backward()


def sum_while_backward_runs() -> list[list[int]]:
    """Return the buckets begun at the end of each layer in the last pass of each step."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, reference = build(), build()
    counts: list[int] = []
    with (
        mock.patch.object(gradients, "_BUCKET_BYTES", LAYER_BYTES),
        mock.patch.object(dist, "all_reduce", side_effect=dist.all_reduce) as sent,
    ):
        waits = BusyClock(torch.device("cpu"))
        sums = OverlappedSums(model.parameters(), dist.group.WORLD, run_wait=waits.run)
        for layer in model:
            layer.register_full_backward_hook(lambda *_: counts.append(sent.call_count))
        found = []
        for step in range(2):
            sent.reset_mock()
            sums.begin(PASSES)
            rows = torch.randn(PASSES, ranks, 5, WIDTH, generator=torch.Generator().manual_seed(step))
            for of_pass in rows:
                counts.clear()
                backward(model, of_pass[rank].clone().requires_grad_())
            found.append([*counts])
            sums.finish()
            backward(reference, rows.flatten(0, 2))
            for own, expected in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(own.grad, expected.grad)
            model.zero_grad()
            reference.zero_grad()
        assert waits.read() > 0, "the clock sees the waits"
    return found


def test_waits_within_computations_are_left_out_of_their_time():
    clock = BusyClock(torch.device("cpu"))
    clock.leave_out(lambda: time.sleep(0.05))
    assert clock.read() == 0, "it does not wait for computations"
    clock.run(lambda: clock.leave_out(lambda: time.sleep(0.05)))
    assert 0 <= clock.read() < 0.05


def test_buckets_are_sent_while_earlier_layers_compute(ranks: RankPools):
    for found in ranks(2).run(sum_while_backward_runs):
        for counts in found:
            assert counts == sorted(counts)
            assert 1 <= counts[1] < counts[-1] <= LAYERS, found
