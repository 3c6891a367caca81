"""How ranks leave a process group after an error, and which GPU each of them takes."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.ranks import RankPools
from tests.helpers.training import tiny_recipe, tiny_training
from trainer.base.errors import LaunchError
from trainer.parallel.mesh import AXES, collectives_within
from trainer.ranks.environment import LaunchEnvironment
from trainer.recipe.plan import plan_run
from trainer.recipe.schema import Recipe
from trainer.training import process_group


class TestLeaving:
    def test_an_error_shows_though_the_other_ranks_hold_up_the_abort(self, monkeypatch):
        """NCCL's shutdown may wait for ranks that wait in a collective."""
        end = threading.Event()
        abort = process_group._abort_process_group
        monkeypatch.setattr(process_group, "_abort_process_group", end.wait)
        monkeypatch.setattr(process_group, "_ABORT_SECONDS", 0.1)
        monkeypatch.setattr(dist, "destroy_process_group", lambda: pytest.fail("a shutdown waits for the other ranks"))
        plan = plan_run(tiny_recipe(parallel={"strategy": "fsdp"}), 1)
        try:
            with (
                pytest.raises(ArithmeticError, match="the cause"),
                process_group.process_group(plan, LaunchEnvironment("none"), torch.device("cpu"), None),
            ):
                raise ArithmeticError("the cause")
        finally:
            end.set()
            abort()
        assert not dist.is_initialized()


class _Meeting:
    """A rendezvous of ranks whose values are known."""

    def __init__(self, values: list[Any]) -> None:
        self._values = values

    def gather(self, value: Any, timeout_seconds: float) -> list[Any]:
        return [value, *self._values]

    def share(self, value: Any, timeout_seconds: float) -> Any:
        return value


class TestDevices:
    @pytest.fixture(autouse=True)
    def _gpus(self, monkeypatch):
        self.visible, self.chosen = 1, []
        monkeypatch.setattr(process_group, "device_type", lambda: "cuda")
        monkeypatch.setattr(process_group, "set_precision", lambda *_: None)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: self.visible)
        monkeypatch.setattr(torch.cuda, "set_device", self.chosen.append)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="aa"))

    @pytest.mark.parametrize(("visible", "number"), [(1, 0), (4, 3)])
    def test_a_rank_takes_its_gpu_or_the_only_one_that_it_sees(self, visible, number):
        self.visible = visible
        environment = LaunchEnvironment("srun", rank=3, local_rank=3, world_size=4, local_world_size=4)
        assert process_group.open_device(environment, False) == torch.device("cuda", number)
        assert self.chosen == [torch.device("cuda", number)]

    def test_ranks_on_one_gpu_are_refused(self):
        environment, device = LaunchEnvironment("srun", world_size=2, local_world_size=2), torch.device("cuda", 0)
        process_group._require_gpus(_Meeting([("bb", "rank 1 on b")]), environment, device, 1.0)
        with pytest.raises(LaunchError, match=r"GPU aa is that of rank 0 on .*, rank 1 on b; start one rank"):
            process_group._require_gpus(_Meeting([("aa", "rank 1 on b")]), environment, device, 1.0)


def test_all_groups_have_the_limit_of_the_run():
    plan = plan_run(tiny_recipe(parallel={"strategy": "fsdp", "stall_timeout": "3 hours"}), 1)
    device = torch.device("cpu")
    with process_group.process_group(plan, LaunchEnvironment("none"), device, None):
        mesh = process_group.open_mesh(plan.layout, device)
        mesh.new_group()
        mesh.subgroup("pp", [0])
        groups = list(dist.distributed_c10d._world.pg_map)
        limits = {group._get_backend(device).options._timeout for group in groups}
    assert len(groups) > 2
    assert limits == {timedelta(hours=3, minutes=1)}
    assert dist.distributed_c10d.default_pg_timeout != timedelta(hours=3, minutes=1)


def limits_of_new_groups(recipe: Recipe) -> tuple[int, set[timedelta]]:
    before = set(dist.distributed_c10d._world.pg_map)
    with collectives_within(timedelta(minutes=77)), tiny_training(recipe):
        new = set(dist.distributed_c10d._world.pg_map) - before
        return len(new), {group._get_backend(torch.device("cpu")).options._timeout for group in new}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "sections"),
    [
        (4, {"parallel": {"strategy": "zero2", "tensor": 2}}),
        (4, {"parallel": {"strategy": "hsdp", "shard": 2}}),
        (2, {"task": {"type": "masked_lm"}, "parallel": {"strategy": "ddp", "pipeline": {"stages": 2}}}),
    ],
)
def test_groups_of_engines_have_the_limit_too(ranks: RankPools, world_size: int, sections: dict[str, Any]):
    pool = ranks(world_size)
    pool.close()  # processes keep the groups of earlier calls
    for number, limits in pool.run(limits_of_new_groups, tiny_recipe(**sections)):
        assert number > 2
        assert limits == {timedelta(minutes=77)}


def end_of_a_collective(axes: tuple[str, str]) -> str:
    """On this rank: the end of a collective of the first axis for which its last rank comes too late."""
    with collectives_within(timedelta(seconds=5)):
        mesh = process_group.ParallelMesh(torch.device("cpu"), **dict.fromkeys(axes, 2))
    if mesh.index(axes[0]) == 1:
        time.sleep(8)
    try:
        dist.all_reduce(torch.ones(1), group=mesh.process_group(axes[0]))
    except RuntimeError as error:
        return str(error)
    return "done"


@pytest.mark.nightly
@pytest.mark.parametrize("axis", AXES)
def test_a_collective_of_an_axis_ends_at_the_limit(ranks: RankPools, axis: str):
    pool = ranks(4)
    pool.close()  # processes keep the groups of earlier calls
    try:
        found = pool.run(end_of_a_collective, (axis, "pp" if axis == "tp" else "tp"))
    finally:
        pool.close()
    assert "imed out" in found[0], found


@pytest.mark.parametrize("stall", ["5 seconds", "10 minutes", "3 hours"])
def test_the_watchdog_reports_before_a_collective_fails(stall: str, monkeypatch):
    """The report of the watchdog names the step of each rank; NCCL's own watchdog only aborts."""
    plan = plan_run(tiny_recipe(parallel={"strategy": "fsdp", "stall_timeout": stall}), 1)
    timeouts: list[Any] = []

    def init(*arguments: Any) -> None:
        timeouts.append(arguments[-1].total_seconds())
        raise ArithmeticError

    monkeypatch.setattr(process_group, "init_process_group", init)
    with (
        pytest.raises(ArithmeticError),
        process_group.process_group(plan, LaunchEnvironment("none"), torch.device("cpu"), None),
    ):
        pytest.fail("no group was made")
    assert timeouts[0] >= plan.recipe.parallel.stall_timeout.seconds + 60
