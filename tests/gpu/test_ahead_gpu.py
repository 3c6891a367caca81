"""Copies on a stream of their own hold the right rows while the GPU is busy, and the host does not wait for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.helpers.training import tiny_recipe, tiny_training
from trainer.parallel.microbatch import Microbatch, RankBatch, copied_ahead

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BATCHES, MICROBATCHES, ROWS, LENGTH = 20, 2, 64, 4096
CYCLES = 20_000_000  # in which the GPU is busy before it reads a copy


def numbered() -> Iterator[RankBatch]:
    """Yield batches in pinned memory with the number of their microbatch in each element."""
    for step in range(BATCHES):
        yield RankBatch(
            [
                Microbatch(
                    {"input_ids": torch.full((ROWS, LENGTH), number)}, torch.full((ROWS,), number), torch.arange(ROWS)
                ).pin_memory()
                for number in range(step * MICROBATCHES, (step + 1) * MICROBATCHES)
            ],
            ROWS,
            ROWS,
        )


def test_copies_hold_their_rows_and_the_host_does_not_wait():
    device = torch.device("cuda", torch.cuda.current_device())
    batches = list(numbered())  # pinning waits
    found = []
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in copied_ahead(iter(batches), device):
            for microbatch in batch.microbatches:
                ready = microbatch.to(device)
                torch.cuda._sleep(CYCLES)  # the copy of the next one ends before this one is read
                sums = torch.stack([ready.inputs["input_ids"].sum(), ready.labels.sum() * LENGTH])
                del ready  # its memory must not be used by a later copy before the sums are computed
                found.append(sums)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = [[number * ROWS * LENGTH] * 2 for number in range(BATCHES * MICROBATCHES)]
    assert torch.stack(found).tolist() == expected


def test_a_training_is_that_without_copies_ahead():
    curves = []
    for ahead in (True, False):
        with tiny_training(tiny_recipe(model={"dropout": 0.1}, training={"micro_batch_size": 4}), device="cuda") as one:
            loader = one.loader
            assert loader.ahead_to is not None
            if not ahead:
                loader.ahead_to = None
            results = [one.engine.train_step(batch) for _, batch in zip(range(6), loader, strict=False)]
            curves.append([(result.loss, result.grad_norm) for result in results])
    for with_copies, without in zip(*curves, strict=True):
        assert with_copies == pytest.approx(without, rel=1e-5)
