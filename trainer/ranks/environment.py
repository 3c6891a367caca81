"""The launcher and rank of this process; the only module that reads or sets environment variables.

A launcher gives the topology and nothing else; the recipe decides the training and its layout. Variables that
contradict each other or the recipe are errors, because a guess would train on the wrong ranks.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Literal

from trainer.base.errors import LaunchError, RecipeError, UsageError
from trainer.base.logging_targets import logging_targets

Launcher = Literal[
    "none",
    "trainer",  # `trainer run`, see `launch/processes.py`
    "torchrun",
    "accelerate",
    "accelerate-single",  # `accelerate launch --cpu` starts one process, however many it was asked for
    "deepspeed",
    "mpirun",  # through `accelerate launch --mpirun_hostfile`
    "srun",
    "sbatch",  # a batch script with several tasks, outside `srun`
    "variables",  # RANK, WORLD_SIZE and the others, without a mark of any launcher
]

_NO_TELEMETRY: Mapping[str, str] = {
    "DO_NOT_TRACK": "true",  # donottrack.sh; huggingface_hub reads it
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_UPDATE_DOWNLOAD_COUNTS": "0",  # datasets, for a data set from another host
}

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""The variable with the network interface for gloo."""

_ACCELERATE_ENGINES: Mapping[str, tuple[str, ...]] = {
    "FSDP": ("fsdp", "hsdp"),
    "DEEPSPEED": (),
    "MEGATRON_LM": (),
}
"""Our strategies for each engine of `accelerate launch`, by its `distributed_type`, without those of packages."""

_FIRST_RESERVED_STEP = 0xFFFFFFF0  # Slurm numbers steps without `srun` (batch, extern, interactive) from here up


@dataclass(frozen=True)
class LaunchEnvironment:
    """The place of this process among the ranks that a launcher started; a lone process is rank 0 of 1."""

    launcher: Launcher
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0  # 0 for a lone process
    accelerate: Mapping[str, str] = field(default_factory=dict)  # the `ACCELERATE_*` variables, see `check_agrees`
    error_file: Path | None = None  # where a rank that `trainer run` started leaves its error
    listen_fd: int | None = None  # the socket on which rank 0 serves the store, where `trainer run` has opened it
    has_agent_store: bool = False  # whether torch's elastic agent has opened the port where the ranks meet
    elastic_nodes: tuple[int, int] | None = None  # the least and most nodes, if nodes may join and leave

    @property
    def has_ranks(self) -> bool:
        """Whether a launcher gave this process its rank; such a process joins and starts no ranks."""
        return self.launcher not in ("none", "accelerate-single", "sbatch")

    @property
    def num_nodes(self) -> int:
        """Number of machines, if all have as many ranks as this one."""
        return -(-self.world_size // self.local_world_size)

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size}, started by {self.launcher}"


def detect(environ: Mapping[str, str] = os.environ) -> LaunchEnvironment:
    """Find the launcher and the rank of this process.

    Raises:
        LaunchError: variables are missing, are not numbers, or contradict each other.
    """
    accelerate = {name: value for name, value in environ.items() if name.startswith("ACCELERATE_")}
    # Other launchers may run inside of a Slurm job, so their variables count before those of Slurm.
    if any(name in environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return _from_rank_variables(environ, accelerate)
    if "ACCELERATE_USE_CPU" in environ:  # set by the launcher that starts a single process, or one `mpirun`
        return _from_mpi(environ, accelerate) or LaunchEnvironment("accelerate-single", accelerate=accelerate)
    return _from_slurm(environ) or LaunchEnvironment("none")


@contextmanager
def problems_name_the_machine() -> Iterator[None]:
    """Name this rank in recipe errors if there are several machines, because a single one may lack a file.

    Raises:
        RecipeError: with the rank in front of each problem.
    """
    try:
        yield
    except RecipeError as error:
        environment = detect()
        if environment.num_nodes == 1:
            raise
        place = f"rank {environment.rank} on {socket.gethostname()}"
        raise RecipeError(*(f"{place}: {problem}" for problem in error.problems)) from error


def check_agrees(
    environment: LaunchEnvironment, *, precision: str, strategy: str, packages: Mapping[str, str] | None = None
) -> None:
    """Refuse a launcher flag that contradicts the recipe; the defaults of launchers contradict nothing.

    Args:
        packages: the package of each strategy with another engine.
    """
    flags = environment.accelerate
    mixed = flags.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    # The launcher sets "no" by default too, so this value asks for nothing.
    if mixed not in ("no", precision):
        raise UsageError(
            f"`precision` is {precision}, but `accelerate launch` got --mixed_precision {mixed};"
            f" the recipe decides: drop the flag, or set `precision` in the recipe"
        )
    dynamo = flags.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    if dynamo != "no":
        raise UsageError(f"`accelerate launch` got --dynamo_backend {dynamo}; the recipe decides: drop the flag")
    for engine, own in _ACCELERATE_ENGINES.items():
        strategies = [*own, *(name for name, package in (packages or {}).items() if package == engine.lower())]
        if flags.get(f"ACCELERATE_USE_{engine}", "false").lower() == "true" and strategy not in strategies:
            raise UsageError(
                f"`parallel.strategy` is {strategy}, but `accelerate launch` got --use_{engine.lower()};"
                f" the recipe decides: drop the flag"
                + (f", or set `parallel.strategy` to one of {', '.join(strategies)}" if strategies else "")
            )


def threads_per_rank(environment: LaunchEnvironment, environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the compute threads for each rank: cores divided by ranks; None if the user or launcher set them."""
    if "OMP_NUM_THREADS" in environ:
        return None
    # A task of Slurm may be one rank, or a launcher that starts the ranks of its machine and shares its cores.
    if (per_task := environ.get("SLURM_CPUS_PER_TASK")) and _slurm_tasks(environ)[1] == environment.world_size:
        return _number(environ, "SLURM_CPUS_PER_TASK", per_task)
    return max(1, available_cores() // environment.local_world_size)


def available_cores() -> int:
    """Return the number of cores that this process may use; a control group may give less time."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gloo_interface() -> str | None:
    """Return the interface for gloo that is set; None: gloo uses that of the host's name."""
    return os.environ.get(GLOO_INTERFACE) or None


def use_gloo_interface(name: str) -> None:
    """Set the interface for all gloo groups of this process."""
    os.environ[GLOO_INTERFACE] = name


def set_rank(environment: LaunchEnvironment) -> None:
    """Set torchrun's variables for a rank that `trainer run` has started, because libraries read them."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    numbers = (environment.rank, environment.local_rank, environment.world_size, environment.local_world_size)
    os.environ.update(zip(names, map(str, numbers), strict=True))
    os.environ.update(MASTER_ADDR=environment.master_addr, MASTER_PORT=str(environment.master_port))


@contextmanager
def variables_restored() -> Iterator[None]:
    """Give back all variables after the block."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def variables_set(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables of libraries for the block."""
    before = {name: os.environ[name] for name in values if name in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values.keys() - before.keys():
            os.environ.pop(name, None)
        os.environ.update(before)


def without_ranks(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables for a child process that is no rank and sees no GPU."""
    of_launchers = ("TORCHELASTIC_", "ACCELERATE_", "OMPI_COMM_", "PMI_", "MPI_", "MV2_COMM_", "SLURM_")
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {key: value for key, value in environ.items() if key not in names and not key.startswith(of_launchers)}
    return {**kept, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def user_cache(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the user's folder for caches (XDG Base Directory Specification).

    Raises:
        UsageError: the user has no home folder and XDG_CACHE_HOME is not set.
    """
    base = Path(environ.get("XDG_CACHE_HOME", ""))
    if base.is_absolute():  # a relative path counts as unset
        return base
    try:
        return (Path(environ["HOME"]) if environ.get("HOME") else Path.home()) / ".cache"
    except RuntimeError as error:
        raise UsageError(
            "this user has no home folder to keep a cache in; set XDG_CACHE_HOME or HOME to one that can be written"
        ) from error


def datasets_cache() -> Path:
    """Return the folder in which `datasets` keeps prepared data sets, without its import."""
    from huggingface_hub import constants

    return Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME, "datasets"))


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the default folder for tokenised data."""
    return user_cache(environ) / "trainer"


def no_telemetry() -> dict[str, str]:
    """Return the variables that stop libraries from reporting their use; see `docs/tracking.md`."""
    return reduce(or_, (target.no_telemetry for target in logging_targets().values()), dict(_NO_TELEMETRY))


def forbid_telemetry(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set `no_telemetry` for this process and its children; libraries read it when they are imported."""
    environ.update(no_telemetry())


def library_settings(*names: str, defaults: Mapping[str, str]) -> list[str]:
    """Return variables that a library reads; empty: not set. Set further ones where the user has not."""
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    return [os.environ.get(name, "") for name in names]


def _from_rank_variables(environ: Mapping[str, str], accelerate: Mapping[str, str]) -> LaunchEnvironment:
    launcher: Launcher
    if "TORCHELASTIC_RUN_ID" in environ:
        # `accelerate launch` starts its ranks by torchrun's agent, and adds variables of its own.
        launcher = "accelerate" if accelerate else "torchrun"
    # Of these launchers, only deepspeed sets these two.
    elif "LOCAL_SIZE" in environ and "CROSS_SIZE" in environ:
        launcher = "deepspeed"
    else:
        launcher = "variables"
    local_size = "LOCAL_SIZE" if launcher == "deepspeed" else "LOCAL_WORLD_SIZE"
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", local_size)
    environment = _environment(launcher, environ, names, accelerate)
    if "TORCHELASTIC_RUN_ID" not in environ:
        return environment
    # torch writes the text of a Python boolean.
    has_store = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return replace(environment, has_agent_store=has_store, elastic_nodes=_elastic_nodes(environ))


def _elastic_nodes(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Return the range of `--nnodes`, which torchrun does not pass to its ranks; None for a fixed number."""
    named = (_nnodes(words) for words in _commands_of_ancestors(3))
    # The nearest command that names a number decides, before torchrun's own variable.
    nodes = next((found for found in named if found is not None), environ.get("PET_NNODES", ""))
    match = re.fullmatch(r"([0-9]+):([0-9]+)", nodes)
    return (int(match[1]), int(match[2])) if match and match[1] != match[2] else None


def _commands_of_ancestors(number: int) -> Iterator[list[str]]:
    """Yield the command line of each ancestor that can be read, the nearest first."""
    import psutil  # here, because the doctor runs without it

    process = psutil.Process()
    with suppress(psutil.Error):
        for _ in range(number):
            parent = process.parent()
            if parent is None:
                return
            with suppress(psutil.Error):  # it may belong to another user
                yield parent.cmdline()
            process = parent


def _nnodes(words: Sequence[str]) -> str | None:
    """Return the value of torchrun's `--nnodes` in a command line, or of a prefix, which argparse takes too."""
    found = None
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if match := re.fullmatch(r"--nn(?:o(?:d(?:es?)?)?)?(?:=(.*))?", word):
            found = match[1] or following
    return found


def _from_mpi(environ: Mapping[str, str], accelerate: Mapping[str, str]) -> LaunchEnvironment | None:
    families = (
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS"),
        ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"),
    )
    for names in families:
        if names[0] in environ:
            return _environment("mpirun", environ, names, accelerate)
    return None


def _from_slurm(environ: Mapping[str, str]) -> LaunchEnvironment | None:
    if "SLURM_PROCID" not in environ:
        return None
    tasks_name, tasks = _slurm_tasks(environ)
    step = environ.get("SLURM_STEP_ID")
    # the batch script itself is task 0 of the job, and has a task's process id, but no step
    in_batch_script = step is None and "SLURM_TASK_PID" in environ
    if in_batch_script:
        return LaunchEnvironment("sbatch", world_size=tasks) if tasks > 1 else None
    reserved = step is not None and _number(environ, "SLURM_STEP_ID", step) >= _FIRST_RESERVED_STEP
    if reserved or "SLURM_PTY_PORT" in environ or tasks == 1:  # a terminal; or one task, which may start its own ranks
        return None
    names = ("SLURM_PROCID", "SLURM_LOCALID", tasks_name, None)
    local_size, address = _slurm_local_size(environ, tasks), _slurm_address(environ, step)
    return _environment("srun", environ, names, {}, local_size, address)


def _slurm_tasks(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return the variable with the number of tasks, and the number."""
    # The numbers of the step come first: a step may have fewer tasks than its job.
    name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    return name, _number(environ, name, environ.get(name, "1"))


def _environment(
    launcher: Launcher,
    environ: Mapping[str, str],
    names: tuple[str, str, str, str | None],
    accelerate: Mapping[str, str],
    local_world_size: int = 1,
    address: tuple[str, int] | None = None,
) -> LaunchEnvironment:
    """Read rank, local rank, world size and local world size from the variables `names`, and check them together."""
    missing = [name for name in names if name is not None and name not in environ]
    if missing:
        present = [name for name in names if name is not None and name in environ]
        raise LaunchError(
            f"{', '.join(present)} set, but {', '.join(missing)} not; start the ranks with one launcher,"
            f" or unset all of {', '.join(filter(None, names))}"
        )
    rank_name, local_rank_name, size_name, local_size_name = names
    rank, local_rank, size = (_number(environ, name, environ[name]) for name in (rank_name, local_rank_name, size_name))
    if local_size_name is not None:
        local_world_size = _number(environ, local_size_name, environ[local_size_name])
    _check_below(rank_name, rank, size_name, size)
    _check_below(local_rank_name, local_rank, local_size_name or "the tasks of this node", local_world_size)
    if local_world_size > size:
        raise LaunchError(
            f"{local_size_name} must be at most {size_name}, which is {size}, but is {local_world_size}; unset the"
            " variables of another launcher"
        )
    host, port = address or _address(environ)
    return LaunchEnvironment(launcher, rank, local_rank, size, local_world_size, host, port, accelerate)


def _check_below(name: str, value: int, limit_name: str, limit: int) -> None:
    if value >= limit:
        raise LaunchError(f"{name} must be below {limit_name}, which is {limit}, but is {value}")


def _number(environ: Mapping[str, str], name: str, value: str) -> int:
    if not re.fullmatch(r"[0-9]{1,10}", value):
        raise LaunchError(f"{name} must be a whole number, but is {value!r}; is it left over from another launcher?")
    return int(value)


def _address(environ: Mapping[str, str]) -> tuple[str, int]:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if missing:
        raise LaunchError(
            "MASTER_ADDR and MASTER_PORT must be the address and a free port of rank 0, but"
            f" {' and '.join(missing)} not set; set them, or unset RANK, WORLD_SIZE and LOCAL_RANK to run alone"
        )
    return environ["MASTER_ADDR"], _port(environ)


def _port(environ: Mapping[str, str]) -> int:
    port = _number(environ, "MASTER_PORT", environ["MASTER_PORT"])
    if not 0 < port < 2**16:
        raise LaunchError(f"MASTER_PORT must be between 1 and 65535, but is {port}")
    return port


def _slurm_address(environ: Mapping[str, str], step: str | None) -> tuple[str, int]:
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
        return host, _port(environ)
    job = _number(environ, "SLURM_JOB_ID", environ.get("SLURM_JOB_ID", "0"))
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


def _slurm_local_size(environ: Mapping[str, str], tasks: int) -> int:
    """Return the number of tasks on this node: its entry in a list such as `2(x3),1`."""
    name = "SLURM_STEP_TASKS_PER_NODE" if "SLURM_STEP_TASKS_PER_NODE" in environ else "SLURM_TASKS_PER_NODE"
    counts = environ.get(name)
    if counts is None:
        nodes = _number(environ, "SLURM_NNODES", environ.get("SLURM_NNODES", "1"))
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
    node = _number(environ, "SLURM_NODEID", environ.get("SLURM_NODEID", "0"))
    _check_below("SLURM_NODEID", node, f"the nodes of {name}", len(per_node))
    return per_node[node]
