"""Ranks that Slurm's srun starts; the only module that knows Slurm's variables."""

from __future__ import annotations

import re
from collections.abc import Mapping

from trainer.base.errors import LaunchError
from trainer.ranks.environment import (
    LaunchEnvironment,
    LauncherFeature,
    check_below,
    environment_of,
    port_of,
    whole_number,
)

_FIRST_RESERVED_STEP = 0xFFFFFFF0  # Slurm numbers steps without `srun` (batch, extern, interactive) from here up


class Slurm(LauncherFeature):
    """Tasks of srun, each a rank, and batch scripts, which are none."""

    def detect(self, environ: Mapping[str, str], known: LaunchEnvironment | None) -> LaunchEnvironment | None:
        if known is not None or "SLURM_PROCID" not in environ:
            return known
        tasks_name, tasks = _tasks(environ)
        step = environ.get("SLURM_STEP_ID")
        # the batch script itself is task 0 of the job, and has a task's process id, but no step
        in_batch_script = step is None and "SLURM_TASK_PID" in environ
        if in_batch_script:
            return LaunchEnvironment("sbatch", world_size=tasks, feature=self, is_alone=True) if tasks > 1 else None
        reserved = step is not None and whole_number("SLURM_STEP_ID", step) >= _FIRST_RESERVED_STEP
        # A terminal, or one task, which may start its own ranks.
        if reserved or "SLURM_PTY_PORT" in environ or tasks == 1:
            return None
        names = ("SLURM_PROCID", "SLURM_LOCALID", tasks_name, None)
        local_size, address = _local_size(environ, tasks), _address(environ, step)
        return environment_of("srun", environ, names, local_size, address)

    def local_ranks(self, environment: LaunchEnvironment) -> int:
        raise LaunchError(
            f"the batch job has {environment.world_size} tasks, but no srun started this process;"
            " use `srun trainer run ...`, or pass --processes for ranks on this node only"
        )

    def cores_per_rank(self, environ: Mapping[str, str], environment: LaunchEnvironment) -> int | None:
        per_task = environ.get("SLURM_CPUS_PER_TASK")
        # A task may be one rank, or a launcher that starts the ranks of its machine and shares its cores.
        if not per_task or _tasks(environ)[1] != environment.world_size:
            return None
        return whole_number("SLURM_CPUS_PER_TASK", per_task)


def _tasks(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return the variable with the number of tasks, and the number."""
    # The numbers of the step come first: a step may have fewer tasks than its job.
    name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    return name, whole_number(name, environ.get(name, "1"))


def _address(environ: Mapping[str, str], step: str | None) -> tuple[str, int]:
    """Return the first host of the step, and a port from the numbers of job and step, rarely shared by two jobs."""
    if "MASTER_ADDR" in environ:
        host = environ["MASTER_ADDR"]
    else:
        nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
        if not nodes:
            raise LaunchError("SLURM_PROCID is set, but neither SLURM_JOB_NODELIST nor MASTER_ADDR is; set MASTER_ADDR")
        # By the usual distributions of Slurm, the first host of the list has rank 0.
        host = first_host(nodes)
        if host == nodes:  # one node, possibly unable to resolve its own name
            host = "127.0.0.1"
    if "MASTER_PORT" in environ:
        return host, port_of(environ)
    job = whole_number("SLURM_JOB_ID", environ.get("SLURM_JOB_ID", "0"))
    # 15000 to 29999: above the ports of services, below the ephemeral ports
    return host, 15000 + (job + 997 * int(step or 0)) % 15000


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list: `gpu[07-09,12],login` gives `gpu07`.

    Raises:
        LaunchError: brackets that do not match, or an empty list.
    """
    match = re.match(r"([^\[\],\s]+)(?:\[([0-9]+)[0-9,-]*\]([^\[\],\s]*))?(?:,|$)", nodes)
    if match is None:
        raise LaunchError(f"SLURM_JOB_NODELIST must be a Slurm node list such as gpu[01-03,07], but is {nodes!r}")
    return match[1] + (match[2] or "") + (match[3] or "")


def _local_size(environ: Mapping[str, str], tasks: int) -> int:
    """Return the number of tasks on this node: its entry in a list such as `2(x3),1`."""
    name = "SLURM_STEP_TASKS_PER_NODE" if "SLURM_STEP_TASKS_PER_NODE" in environ else "SLURM_TASKS_PER_NODE"
    counts = environ.get(name)
    if counts is None:
        nodes = whole_number("SLURM_NNODES", environ.get("SLURM_NNODES", "1"))
        return -(-tasks // max(1, nodes))
    per_node: list[int] = []
    for entry in counts.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]{1,6})\))?", entry)
        if match is None:
            raise LaunchError(f"{name} must be a list such as 2(x3),1, but is {counts!r}")
        per_node += [int(match[1])] * int(match[2] or 1)
    if name.startswith("SLURM_STEP") and "SLURM_STEP_NUM_TASKS" in environ and sum(per_node) != tasks:
        raise LaunchError(
            f"{name} must add up to SLURM_STEP_NUM_TASKS, which is {tasks}, but is {counts!r}; unset the variables of"
            " another step"
        )
    node = whole_number("SLURM_NODEID", environ.get("SLURM_NODEID", "0"))
    check_below("SLURM_NODEID", node, f"the nodes of {name}", len(per_node))
    return per_node[node]
