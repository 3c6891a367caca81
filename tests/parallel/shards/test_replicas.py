"""Ranks that hold the same part of a parameter hold the same bits, or all of them stop and say so."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.ranks import RankError, RankPools
from tests.helpers.training import tiny_recipe, tiny_training
from trainer.parallel.shards.replicas import check_replicas

LAYOUTS = [
    (2, {"strategy": "ddp"}),
    (2, {"tensor": 2, "sequence": True}),
    pytest.param(4, {"strategy": "hsdp", "shard": 2}, marks=pytest.mark.slow),
    (2, {"strategy": "zero3"}),
]


def train_and_check(parallel: dict[str, object], damaged: str | None = None) -> None:
    """Three steps on this rank; then the last rank's part of one parameter is changed in its last bit."""
    with tiny_training(tiny_recipe(parallel=parallel)) as training:
        engine, mesh = training.engine, training.mesh
        training.steps(3)
        held = engine.held()
        check_replicas(held, engine.placements, mesh, 3)
        if damaged and mesh.rank == mesh.world_size - 1:
            bits = held[damaged].view(-1).view(torch.int32)
            bits[0] += 1
        check_replicas(held, engine.placements, mesh, 3)


@pytest.mark.parametrize(("num_ranks", "parallel"), LAYOUTS)
def test_trained_replicas_are_equal(ranks: RankPools, num_ranks, parallel):
    ranks(num_ranks).run(train_and_check, parallel)


@pytest.mark.parametrize(
    ("num_ranks", "parallel", "damaged", "which"),
    [
        (2, {"strategy": "ddp"}, "classifier.weight", "0, 1"),
        (2, {"tensor": 2}, "bert.encoder.layer.1.output.LayerNorm.bias", "0, 1"),
        (4, {"strategy": "hsdp", "shard": 2}, "classifier.weight", "1, 3"),
    ],
)
def test_one_different_bit_is_detected(ranks: RankPools, num_ranks, parallel, damaged, which):
    with pytest.raises(RankError) as error:
        ranks(num_ranks).run(train_and_check, parallel, damaged)
    words = f"after step 3, ranks {which} must hold the same part of {damaged}, but its values differ"
    assert words in str(error.value)
    assert all(f"rank {rank}" in str(error.value) for rank in range(num_ranks)), "all stop"


def test_a_part_without_a_replica_is_not_compared(ranks: RankPools):
    ranks(2).run(train_and_check, {"tensor": 2}, "bert.encoder.layer.0.intermediate.dense.weight")
