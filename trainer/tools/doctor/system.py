"""Checks of system resources: cores, memory, shared memory and limits."""

from __future__ import annotations

import os
import resource

from trainer.base import cgroup
from trainer.ranks.environment import available_cores, threads_per_rank
from trainer.tools.doctor.finding import GIB, MIB, Finding, ok, problem, size, warning
from trainer.tools.doctor.machine import Machine

_LEAST_SHARED_BYTES = GIB
_LEAST_FREE_SHARED_BYTES = 256 * MIB
_LEAST_MEMORY_BYTES = 2 * GIB
_LEAST_NUMBER = 1024  # of open files, and of processes


def cores(machine: Machine) -> Finding:
    """The cores of this process, and the processor time that its control group allows."""
    seen = available_cores()
    value = f"{seen} of {os.cpu_count()}"
    if threads := machine.environ.get("OMP_NUM_THREADS"):
        value += f", OMP_NUM_THREADS={threads}"
    given = cgroup.num_cores(machine.read)
    if given is None or given >= seen:
        return ok(value)
    value += f", but the control group allows {given:.3g}"
    if threads_per_rank(1, machine.environ) is None:
        return ok(value)
    return warning(value, f"set OMP_NUM_THREADS to {max(1, int(given))} divided by the number of ranks on this machine")


def memory(machine: Machine) -> Finding:
    """The memory of the machine, and the limit of the control group."""
    import psutil

    of_machine = psutil.virtual_memory()
    limit = cgroup.memory_bytes(machine.read)
    value = f"{size(of_machine.total)}, {size(of_machine.available)} free"
    if limit is not None and limit < of_machine.total:
        value += f", but the control group allows {size(limit)}"
    if min(of_machine.available, limit or of_machine.available) < _LEAST_MEMORY_BYTES:
        return warning(value, "end other programs, or raise the limit of the container (`--memory`) or of the job")
    return ok(value)


def shared_memory(machine: Machine) -> Finding:
    """`/dev/shm`, which data loaders and NCCL use between processes."""
    place = machine.path("/dev/shm")
    if not place.is_dir():
        return ok("there is no /dev/shm on this system")
    more = "start the container with --shm-size=8g or --ipc=host (Kubernetes: an emptyDir of medium Memory there)"
    if not os.access(place, os.W_OK):
        return problem("/dev/shm cannot be written", more)
    status = os.statvfs(place)
    total, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    value = f"{size(total)}, {size(free)} free"
    if total < _LEAST_SHARED_BYTES:
        return warning(value, more)
    if free < _LEAST_FREE_SHARED_BYTES:
        return warning(value, "delete the files of dead programs: see `ls -l /dev/shm`")
    return ok(value)


def open_files(machine: Machine) -> Finding:
    """The limit of open files of a process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    value = f"{_limit(soft)} (can be raised to {_limit(hard)})"
    if 0 <= soft < _LEAST_NUMBER:  # unlimited is -1
        return warning(value, "ulimit -n 65536, or `--ulimit nofile=65536` in Docker")
    return ok(value)


def processes(machine: Machine) -> Finding:
    """The limit of processes and threads, of the user and of the control group."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    of_group = cgroup.num_processes(machine.read)
    value = _limit(soft) if of_group is None else f"{_limit(soft)}, {of_group:,} in the control group"
    if 0 <= soft < _LEAST_NUMBER or (of_group is not None and of_group < _LEAST_NUMBER):
        return warning(value, "ulimit -u 65536, or `--pids-limit -1` in Docker")
    return ok(value)


def locked_memory(machine: Machine) -> Finding:
    """The limit of locked memory, which InfiniBand uses for its transfers."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    value = "unlimited" if soft == resource.RLIM_INFINITY else size(soft)
    has_infiniband = any(machine.path("/sys/class/infiniband").glob("*"))
    if has_infiniband and soft != resource.RLIM_INFINITY:
        return warning(f"{value}, with InfiniBand", "ulimit -l unlimited, or `--ulimit memlock=-1` in Docker")
    return ok(value)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"
