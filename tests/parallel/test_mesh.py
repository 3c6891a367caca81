"""The grid of ranks: who is where, who talks to whom, how ranks decide together."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.ranks import RankError, RankPools
from trainer.base.errors import TrainerError, UsageError
from trainer.parallel.mesh import AXES, JOINT_AXES, ParallelMesh

CPU = torch.device("cpu")


def coordinates(**degrees: int) -> dict[str, tuple[int, int, list[int]]]:
    """Size, index and the ranks of the group along every axis."""
    mesh = ParallelMesh(CPU, **degrees)
    found = {}
    for axis in (*AXES, *JOINT_AXES):
        group = mesh.group(axis)
        ranks = [mesh.rank] if group is None else dist.get_process_group_ranks(group)
        found[axis] = (mesh.size(axis), mesh.index(axis), ranks)
    return found


def sum_over(axis: str, **degrees: int) -> float:
    mesh = ParallelMesh(CPU, **degrees)
    return mesh.sum_(torch.tensor(float(10**mesh.rank)), axis).item()


def decide() -> dict[str, Any]:
    mesh = ParallelMesh(CPU, dp_replicate=dist.get_world_size())
    rank = mesh.rank
    return {
        "agree_max": mesh.agree_max(15 if rank == mesh.world_size - 1 else 0),
        "agree_large": mesh.agree_max(2**62 + rank),
        "gather": mesh.gather({"rank": rank, "tensor": torch.arange(rank)}),
        "distinct": mesh.gather_distinct({"name": (rank + 1) // 2}),
        "share": mesh.share([f"of rank {rank}"]),
        "on_rank_zero": mesh.on_rank_zero(lambda: f"done by rank {rank}"),
    }


def fail_on_rank_zero(kind: str) -> str:
    mesh = ParallelMesh(CPU, dp_replicate=dist.get_world_size())

    def action() -> None:
        if mesh.rank == 0:
            raise UsageError("the folder is full") if kind == "user" else ZeroDivisionError("our own bug")

    try:
        mesh.on_rank_zero(action)
    except TrainerError as error:
        mesh.barrier()  # nobody has left
        return f"{type(error).__name__}: {error}"
    return "no error"


def times_through_a_barrier() -> tuple[float, float]:
    mesh = ParallelMesh(CPU, dp_replicate=dist.get_world_size())
    mesh.barrier()
    if mesh.rank == 1:
        time.sleep(0.3)
    before = time.monotonic()
    mesh.barrier()
    return before, time.monotonic()


class TestOneRank:
    """Needs no process group."""

    def test_every_axis_has_one_rank_and_no_group(self):
        assert not dist.is_initialized()
        mesh = ParallelMesh(CPU)
        assert (mesh.rank, mesh.world_size, mesh.device_mesh) == (0, 1, None)
        for axis in (*AXES, "dp"):
            assert (mesh.size(axis), mesh.index(axis), mesh.group(axis)) == (1, 0, None)

    def test_every_collective_is_the_identity(self):
        mesh = ParallelMesh(CPU)
        tensor = torch.tensor(3.0)
        assert mesh.sum_(tensor, "dp") is tensor
        assert mesh.agree_max(-5) == -5
        assert mesh.gather("a") == mesh.gather_distinct("a") == ["a"]
        assert mesh.share("a") == "a"
        assert mesh.on_rank_zero(lambda: "a") == "a"
        mesh.barrier()

    def test_an_error_is_its_own(self):
        with pytest.raises(ZeroDivisionError):
            ParallelMesh(CPU).on_rank_zero(lambda: 1 / 0)

    def test_an_unknown_axis_is_our_own_bug(self):
        with pytest.raises(AssertionError, match="dp_relicate"):
            ParallelMesh(CPU, dp_relicate=1)


class TestLayout:
    def test_two_replicas(self, ranks: RankPools):
        for rank, found in enumerate(ranks(2).run(coordinates, dp_replicate=2)):
            assert found["dp"] == found["dp_replicate"] == (2, rank, [0, 1])
            assert found["dp_shard"] == found["tp"] == found["pp"] == (1, 0, [rank])

    def test_hsdp_shards_on_neighbouring_ranks(self, ranks: RankPools):
        for rank, found in enumerate(ranks(4).run(coordinates, dp_replicate=2, dp_shard=2)):
            assert found["dp_replicate"] == (2, rank // 2, [rank % 2, rank % 2 + 2])
            assert found["dp_shard"] == (2, rank % 2, [rank // 2 * 2, rank // 2 * 2 + 1])
            assert found["dp"] == (4, rank, [0, 1, 2, 3])

    def test_context_ranks_are_around_tensor_ranks(self, ranks: RankPools):
        for rank, found in enumerate(ranks(4).run(coordinates, cp=2, tp=2)):
            assert found["tp"] == (2, rank % 2, [rank // 2 * 2, rank // 2 * 2 + 1])
            assert found["cp"] == (2, rank // 2, [rank % 2, rank % 2 + 2])
            assert found["cp_tp"] == (4, rank, [0, 1, 2, 3])

    def test_tensor_ranks_are_neighbours_and_see_the_same_rows(self, ranks: RankPools):
        for rank, found in enumerate(ranks(4).run(coordinates, dp_shard=2, tp=2)):
            assert found["tp"] == found["cp_tp"] == (2, rank % 2, [rank // 2 * 2, rank // 2 * 2 + 1])
            assert found["dp"] == (2, rank // 2, [rank % 2, rank % 2 + 2])

    def test_stages_are_farthest_apart(self, ranks: RankPools):
        for rank, found in enumerate(ranks(4).run(coordinates, pp=2, dp_replicate=2)):
            assert found["pp"] == (2, rank // 2, [rank % 2, rank % 2 + 2])
            assert found["dp"] == (2, rank % 2, [rank // 2 * 2, rank // 2 * 2 + 1])

    def test_degrees_that_do_not_make_the_world_are_our_own_bug(self, ranks: RankPools):
        with pytest.raises(RankError, match="multiply to the world size"):
            ranks(2).run(coordinates, dp_replicate=3)


class TestCollectives:
    @pytest.mark.parametrize(
        ("axis", "sums"),
        [("dp", [1111] * 4), ("dp_replicate", [101, 1010, 101, 1010]), ("dp_shard", [11, 11, 1100, 1100])],
    )
    def test_sum_over_one_axis(self, ranks: RankPools, axis, sums):
        assert ranks(4).run(sum_over, axis, dp_replicate=2, dp_shard=2) == sums

    def test_a_sum_over_an_axis_of_one_rank_is_the_identity(self, ranks: RankPools):
        assert ranks(2).run(sum_over, "tp", dp_replicate=2) == [1, 10]

    def test_deciding_together(self, ranks: RankPools):
        first, *others = ranks(3).run(decide)
        for found in (first, *others):
            assert found["agree_max"] == 15
            assert found["agree_large"] == 2**62 + 2
            assert found["share"] == ["of rank 0"]
            assert found["on_rank_zero"] == "done by rank 0"
        assert [part["rank"] for part in first["gather"]] == [0, 1, 2]
        assert first["gather"][2]["tensor"].tolist() == [0, 1]
        assert [other["gather"] for other in others] == [None, None]
        assert [one["distinct"] for one in (first, *others)] == [[{"name": 0}, {"name": 1}], None, None]

    def test_a_users_error_on_rank_zero_is_raised_on_all(self, ranks: RankPools):
        assert ranks(3).run(fail_on_rank_zero, "user") == ["UsageError: the folder is full"] * 3

    def test_our_own_bug_on_rank_zero_is_not_dressed_up(self, ranks: RankPools):
        with pytest.raises(RankError, match="our own bug"):
            ranks(2).run(fail_on_rank_zero, "bug")

    def test_a_barrier_waits_for_the_last(self, ranks: RankPools):
        (_, first_left), (last_came, _) = ranks(2).run(times_through_a_barrier)
        assert first_left >= last_came
