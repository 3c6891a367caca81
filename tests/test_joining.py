"""Ranks that cannot meet say so in one line."""

from __future__ import annotations

import sys

import pytest
import torch.distributed as dist

from tests.helpers import processes
from trainer.errors import ExitCode, LaunchError, TrainerError
from trainer.joining import joining
from trainer.launch.environment import LaunchEnvironment

RANK = LaunchEnvironment("variables", rank=1, world_size=2, master_addr="node0", master_port=29500)


def test_a_taken_port_is_the_users_error():
    message = "The server socket has failed to listen: EADDRINUSE"
    with pytest.raises(LaunchError, match="MASTER_PORT is 29500, but another program"), joining(RANK, 60):
        raise dist.DistNetworkError(message)


def test_a_rank_0_that_is_not_there_is_a_failure():
    with (
        pytest.raises(TrainerError, match=r"rank 1 could not meet .* node0:29500.*\(timed out\)") as error,
        joining(RANK, 60),
    ):
        raise dist.DistStoreError("timed out\nwith a stack of C++")
    assert error.value.exit_code is ExitCode.FAILED


def test_torch_that_hangs_beyond_its_timeout_is_ended():
    code = (
        "import time; from trainer import joining; from trainer.launch.environment import LaunchEnvironment\n"
        "joining._AFTER_TORCH_SECONDS = 0.1\n"
        "with joining.joining(LaunchEnvironment('variables', 1, 1, 2, 2, 'node0', 29500), 0.1): time.sleep(60)"
    )
    ended = processes.run([sys.executable, "-c", code])
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: rank 1 could not meet the others at node0:29500")
