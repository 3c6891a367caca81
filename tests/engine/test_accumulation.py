"""Accumulation: the gradient of the whole batch, synchronised once."""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch import nn

from trainer.engine.accumulation import AccumulationSchedule
from trainer.parallel.microbatch import Microbatch


def microbatch(*values: float) -> Microbatch:
    return Microbatch({"x": torch.tensor(values)}, torch.zeros(len(values)), torch.arange(len(values)))


class Recorder:
    """A loss whose gradient is known, and a `no_sync` that says which backward passes it was around."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.tensor(2.0))
        self.inside = False
        self.synced: list[bool] = []

    def forward_loss(self, batch: Microbatch) -> torch.Tensor:
        self.synced.append(not self.inside)
        return (self.weight * batch.inputs["x"]).sum()

    @contextmanager
    def no_sync(self):
        self.inside = True
        yield
        self.inside = False


def run(*microbatches: Microbatch, scale: float = 1.0) -> tuple[float, float, list[bool]]:
    recorder = Recorder()
    schedule = AccumulationSchedule(recorder.forward_loss, recorder.no_sync)
    loss = schedule.run(microbatches, torch.tensor(6.0), scale)
    assert not loss.requires_grad
    return loss.item(), recorder.weight.grad.item(), recorder.synced


def test_microbatches_of_unequal_size_weigh_by_their_rows():
    loss, gradient, synced = run(microbatch(1, 2, 3), microbatch(4, 5), microbatch(6))
    assert (loss, gradient) == (2 * 21 / 6, 21 / 6)
    assert synced == [False, False, True]


def test_a_single_microbatch_is_synchronised():
    assert run(microbatch(1, 2, 3, 4, 5, 6)) == (2 * 21 / 6, 21 / 6, [True])


def test_a_loss_scale_is_in_the_gradient_and_not_in_the_loss():
    loss, gradient, _ = run(microbatch(1, 2, 3), microbatch(4, 5), microbatch(6), scale=8.0)
    assert (loss, gradient) == (2 * 21 / 6, 8 * 21 / 6)
