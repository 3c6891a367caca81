"""Programs that tests run as a user would, and that never outlive the test."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]

LAUNCHER_PREFIXES = ("ACCELERATE_", "CROSS_", "GROUP_", "LOCAL_", "MASTER_", "OMPI_", "PMI_", "SLURM_", "TORCHELASTIC_")


def environment(**variables: str) -> dict[str, str]:
    """Return the environment of a user's shell: no launcher's variables, one thread per process, no network."""
    names = ("RANK", "WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE")
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(LAUNCHER_PREFIXES) and name not in names
    }
    path = os.pathsep.join(filter(None, [str(ROOT), inherited.get("PYTHONPATH")]))
    ours = {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": path,
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # else a look for GPUs before a fork forbids its children to use them
    }
    return inherited | ours | variables


def start(command: Sequence[str | Path], cwd: Path = ROOT, **variables: str) -> subprocess.Popen[str]:
    """Start a command in its own process group, with stdout and stderr as pipes."""
    return subprocess.Popen(
        [str(word) for word in command],
        cwd=cwd,
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], timeout_seconds: float = 480.0) -> subprocess.CompletedProcess[str]:
    """Wait for a started process. On timeout, kill it with its group, and fail."""
    try:
        stdout, stderr = process.communicate(timeout=timeout_seconds)
    except BaseException:
        kill(process)
        with suppress(subprocess.TimeoutExpired):  # a process that it left behind may hold the pipes
            print(*process.communicate(timeout=5), sep="\n")
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def kill(process: subprocess.Popen[str]) -> None:
    """Kill a started process, its group, and descendants in other groups (torchrun starts its ranks there)."""
    below: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        below = psutil.Process(process.pid).children(recursive=True)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for child in below:
        with suppress(psutil.NoSuchProcess):
            child.kill()


def run(
    command: Sequence[str | Path], timeout_seconds: float = 480.0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return finish(start(command, **variables), timeout_seconds)
