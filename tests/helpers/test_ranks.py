"""Tests of the helper that runs all multi-rank tests: it must fail when a rank fails."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from dataclasses import dataclass

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.helpers.ranks import RankError, RankPool, RankPools


@dataclass(frozen=True)
class Offset:
    value: int


def sum_of_ranks(offset: Offset, *, factor: int = 1) -> torch.Tensor:
    total = torch.tensor(dist.get_rank() + offset.value)
    dist.all_reduce(total)
    return total * factor


def process_id() -> int:
    return os.getpid()


def draw() -> float:
    return torch.rand(()).item()


def fail_on(failing: int) -> None:
    if dist.get_rank() == failing:
        raise ValueError("the weights differ")
    dist.barrier()


def leave(how: str) -> None:
    if dist.get_rank() == 1:
        if how == "exit":
            os._exit(7)
        elif how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise SystemExit(0)
    dist.barrier()


def sleep_on_last(seconds: float) -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(seconds)


def start_child() -> int:
    process = torch.multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    process.start()
    return process.pid


@pytest.fixture
def pool():
    pool = RankPool(2)
    yield pool
    pool.close()


def test_results_come_in_the_order_of_the_ranks_and_processes_are_kept(ranks):
    assert [total.item() for total in ranks(3).run(sum_of_ranks, Offset(10), factor=2)] == [66, 66, 66]
    processes = ranks(3).run(process_id)
    assert len({*processes, os.getpid()}) == 4
    assert ranks(3).run(process_id) == processes


def test_every_call_starts_from_one_seed(ranks):
    first, second = ranks(2).run(draw)
    assert first == second == ranks(2).run(draw)[0]


def test_the_failing_ranks_traceback_is_shown_and_waiting_ranks_do_not_hang(pool):
    started = time.monotonic()
    with pytest.raises(RankError) as error:
        pool.run(fail_on, 1)
    message = str(error.value)
    assert "rank 1 of 2 failed" in message
    assert "fail_on" in message
    assert "ValueError: the weights differ" in message
    assert "rank 0 had not answered and was killed" in message
    assert time.monotonic() - started < 240, "it waits for the answer of rank 0"
    assert pool.run(draw)  # new processes


@pytest.mark.parametrize(
    ("how", "words"), [("exit", "exit code 7"), ("kill", "SIGKILL"), ("system exit", "SystemExit: 0")]
)
def test_a_rank_that_leaves_is_reported(pool, how, words):
    with pytest.raises(RankError, match="rank 1 of 2 failed") as error:
        pool.run(leave, how)
    assert words in str(error.value)


def test_a_rank_that_hangs_is_killed_and_named(pool):
    processes = pool.run(process_id)
    with pytest.raises(RankError, match="rank 1 of 2 did not answer in 1 s"):
        pool.run(sleep_on_last, 60, timeout_seconds=1)
    assert not any(psutil.pid_exists(pid) for pid in processes)


def test_processes_that_a_rank_started_end_with_it(pool):
    children = pool.run(start_child)
    pool.close()
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in children if psutil.pid_exists(pid)], timeout=60)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_a_function_without_a_name_is_refused(ranks):
    with pytest.raises(TypeError, match="top of a module"):
        ranks(2).run(lambda: None)


def start_method() -> str:
    return multiprocessing.get_start_method()


def variable(name: str) -> str | None:
    return os.environ.get(name)


def test_ranks_have_the_environment_of_a_shell():
    """A compiler needs PATH to find its components. Workers of a data loader start as they do under a launcher."""
    pool = RankPool(1)
    try:
        assert pool.run(start_method) == [multiprocessing.get_start_method()]
        assert pool.run(variable, "PATH") == [os.environ["PATH"]]
        assert pool.run(variable, "OMP_NUM_THREADS") == ["1"]
    finally:
        pool.close()


def test_pools_keep_the_last_used_processes():
    pools = RankPools(most_ranks=1)
    try:
        (oldest,), (older, _), last = (pools(number).run(process_id) for number in (1, 2, 3))
        assert [psutil.pid_exists(pid) for pid in (oldest, older, *last)] == [False, False, True, True, True]
        assert pools(3).run(process_id) == last
    finally:
        pools.close()
