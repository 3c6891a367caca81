"""What a user reads where the ranks cannot meet: a port that is taken, an address where nobody answers."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from trainer.errors import ExitCode, LaunchError, TrainerError
from trainer.launch.environment import LaunchEnvironment

_AFTER_TORCH_SECONDS = 30.0


@contextmanager
def joining(environment: LaunchEnvironment, timeout_seconds: float) -> Iterator[None]:
    """Inside, this rank meets the others; where it cannot, one line says why.

    A program that has the port and keeps silent holds torch's store beyond any timeout, so that the process ends here.

    Args:
        environment: of this rank.
        timeout_seconds: what torch was told to wait at most.

    Raises:
        LaunchError: the port is taken, on rank 0.
        TrainerError: rank 0 is not to be reached.
    """
    timer = threading.Timer(timeout_seconds + _AFTER_TORCH_SECONDS, _give_up, (environment,))
    timer.daemon = True
    timer.start()
    try:
        yield
    except dist.DistError as error:
        if "EADDRINUSE" in str(error):
            raise LaunchError(
                f"MASTER_PORT is {environment.master_port}, but another program has that port of"
                f" {socket.gethostname()}; set it to a free port, the same for all ranks"
            ) from error
        raise TrainerError(f"{_not_met(environment)} ({str(error).splitlines()[0]})") from error
    finally:
        timer.cancel()


def _give_up(environment: LaunchEnvironment) -> None:
    os.write(sys.stderr.fileno(), f"error: {_not_met(environment)}\n".encode())
    os._exit(ExitCode.FAILED)


def _not_met(environment: LaunchEnvironment) -> str:
    return (
        f"rank {environment.rank} could not meet the others at {environment.master_addr}:{environment.master_port}; see"
        " that rank 0 runs there, that the port is open to this machine, and that no other program has it"
    )
