"""The numbers of ranks for the record of a step."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.helpers.ranks import RankPools
from trainer.parallel.mesh import ParallelMesh
from trainer.training.rank_numbers import RankNumbers


def numbers_of(rank: int) -> RankNumbers:
    return RankNumbers(2**40 + rank, 0.1 * rank, 3 + rank, 9, 1e5 + rank / 3, [[], [rank / 7, 1.5], [0.25]])


def gathered() -> list[RankNumbers]:
    mesh = ParallelMesh(torch.device("cpu"), dp_shard=dist.get_world_size() if dist.is_initialized() else 1)
    return numbers_of(mesh.rank).of_every_rank(mesh)


def test_equal_every_rank_to_the_last_digit(ranks: RankPools):
    assert ranks(2).run(gathered) == [[numbers_of(0), numbers_of(1)]] * 2


def test_of_one_process_equal_its_numbers():
    assert gathered() == [numbers_of(0)]
