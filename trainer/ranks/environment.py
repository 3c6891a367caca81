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

from trainer.base.errors import LaunchError, RecipeError, UsageError
from trainer.base.extensions import resolved, rows_of
from trainer.base.logging_targets import logging_targets

_NO_TELEMETRY: Mapping[str, str] = {
    "DO_NOT_TRACK": "true",  # donottrack.sh; huggingface_hub reads it
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_UPDATE_DOWNLOAD_COUNTS": "0",  # datasets, for a data set from another host
}

_TASKS = {
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_SIZE": "MV2_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
}
"""Variables of other launchers: the number of tasks, and which of them this process is."""

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""The variable with the network interface for gloo."""


@dataclass(frozen=True)
class LaunchEnvironment:
    """The place of this process among the ranks that a launcher started; a lone process is rank 0 of 1."""

    launcher: str  # its name; "none": none; "variables": RANK, WORLD_SIZE and the others, without a mark of a launcher
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0  # 0 for a lone process
    feature: LauncherFeature | None = field(default=None, compare=False)  # the launcher, if it is registered
    is_alone: bool = False  # whether the launcher started this process only, without a rank
    error_file: Path | None = None  # where a rank that `trainer run` started leaves its error
    listen_fd: int | None = None  # the socket on which rank 0 serves the store, where `trainer run` has opened it
    has_agent_store: bool = False  # whether torch's elastic agent has opened the port where the ranks meet
    elastic_nodes: tuple[int, int] | None = None  # the least and most nodes, if nodes may join and leave

    @property
    def has_ranks(self) -> bool:
        """Whether a launcher gave this process its rank; such a process joins and starts no ranks."""
        return self.launcher != "none" and not self.is_alone

    @property
    def num_nodes(self) -> int:
        """Number of machines, if all have as many ranks as this one."""
        return -(-self.world_size // self.local_world_size)

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size}, started by {self.launcher}"


class LauncherFeature:
    """A launcher with variables or flags of its own."""

    def detect(self, environ: Mapping[str, str], known: LaunchEnvironment | None) -> LaunchEnvironment | None:
        """Return the place of this process; None: no launcher started it.

        Args:
            known: the place by RANK, WORLD_SIZE and LOCAL_RANK, or by another launcher; None: there is none yet.

        Raises:
            LaunchError: variables are missing, are not numbers, or contradict each other.
        """
        raise NotImplementedError

    def check(self, precision: str, strategy: str, packages: Mapping[str, str]) -> None:
        """Refuse a flag that contradicts the recipe; defaults of the launcher contradict nothing.

        Args:
            packages: the package of each strategy with another engine.

        Raises:
            UsageError: a flag contradicts it.
        """

    def local_ranks(self, environment: LaunchEnvironment) -> int:
        """Return the number of ranks to start for a process that `is_alone`.

        Raises:
            LaunchError: the number is unknown, or the ranks cannot be started here.
        """
        raise NotImplementedError

    def cores_per_rank(self, environ: Mapping[str, str], environment: LaunchEnvironment) -> int | None:
        """Return the cores that the launcher gave to each rank; None: the ranks share those of the machine."""
        return None


@dataclass(frozen=True)
class _Row:
    """A row of `launcher` in an `extension.json`."""

    prefix: str  # of the variables of the launcher
    feature: str  # the text "module:name" of its `LauncherFeature`


def _features(environ: Mapping[str, str]) -> Iterator[LauncherFeature]:
    """Yield the registered launchers that have set variables; others are not imported."""
    for row in rows_of("launcher", _Row).values():
        if any(name.startswith(row.prefix) for name in environ):
            yield resolved(row.feature)()


def detect(environ: Mapping[str, str] = os.environ) -> LaunchEnvironment:
    """Find the launcher and the rank of this process.

    Raises:
        LaunchError: variables are missing, are not numbers, or contradict each other.
    """
    has_rank = any(name in environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    # Other launchers may run inside of a batch job, so their variables count before those of registered launchers.
    environment = _from_rank_variables(environ) if has_rank else None
    for feature in _features(environ):
        environment = feature.detect(environ, environment)
    if environment is None:
        _require_one_task(environ)
    return environment or LaunchEnvironment("none")


def _require_one_task(environ: Mapping[str, str]) -> None:
    """Refuse tasks of a launcher that no feature reads: each would train the whole recipe in the same folder."""
    known = tuple(row.prefix for row in rows_of("launcher", _Row).values())
    for size, task in _TASKS.items():
        if not size.startswith(known) and task in environ and whole_number(size, environ.get(size, "1")) > 1:
            raise LaunchError(
                f"this process is one of {environ[size]} tasks ({size}), but no launcher of this installation reads"
                f" {task}; start ranks with torchrun, set RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR"
                f" and MASTER_PORT, or unset {size} to train in this process alone"
            )


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


def threads_per_rank(environment: LaunchEnvironment, environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the compute threads for each rank: cores divided by ranks; None if the user or launcher set them."""
    if "OMP_NUM_THREADS" in environ:
        return None
    for feature in _features(environ):
        if (cores := feature.cores_per_rank(environ, environment)) is not None:
            return cores
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
    registered = [row.prefix for row in rows_of("launcher", _Row).values()]
    of_launchers = ("TORCHELASTIC_", "OMPI_COMM_", "PMI_", "MPI_", "MV2_COMM_", *registered)
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


def _from_rank_variables(environ: Mapping[str, str]) -> LaunchEnvironment:
    if "TORCHELASTIC_RUN_ID" in environ:
        launcher = "torchrun"
    # Of these launchers, only deepspeed sets these two.
    elif "LOCAL_SIZE" in environ and "CROSS_SIZE" in environ:
        launcher = "deepspeed"
    else:
        launcher = "variables"
    local_size = "LOCAL_SIZE" if launcher == "deepspeed" else "LOCAL_WORLD_SIZE"
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", local_size)
    environment = environment_of(launcher, environ, names)
    if "TORCHELASTIC_RUN_ID" not in environ:
        return environment
    # torch writes the text of a Python boolean.
    has_store = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return replace(environment, has_agent_store=has_store, elastic_nodes=_elastic_nodes(environ))


def _elastic_nodes(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Return the range of `--nnodes`, which torchrun does not pass to its ranks; None for a fixed number."""
    named = (_nnodes(words) for words in _commands_of_ancestors(3))
    # The nearest command that names a number decides, before torchrun's own variable.
    nodes = next((value for value in named if value is not None), environ.get("PET_NNODES", ""))
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
    value = None
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if match := re.fullmatch(r"--nn(?:o(?:d(?:es?)?)?)?(?:=(.*))?", word):
            value = match[1] or following
    return value


def environment_of(
    launcher: str,
    environ: Mapping[str, str],
    names: tuple[str, str, str, str | None],
    local_world_size: int = 1,
    address: tuple[str, int] | None = None,
) -> LaunchEnvironment:
    """Read rank, local rank, world size and local world size from the variables `names`, and check them together.

    Args:
        names: the last one may be None, and `local_world_size` is given instead.
        address: host and port of rank 0; None: those of MASTER_ADDR and MASTER_PORT.

    Raises:
        LaunchError: variables are missing, are not numbers, or contradict each other.
    """
    missing = [name for name in names if name is not None and name not in environ]
    if missing:
        present = [name for name in names if name is not None and name in environ]
        raise LaunchError(
            f"{', '.join(present)} set, but {', '.join(missing)} not; start the ranks with one launcher,"
            f" or unset all of {', '.join(filter(None, names))}"
        )
    rank_name, local_rank_name, size_name, local_size_name = names
    rank, local_rank, size = (whole_number(name, environ[name]) for name in (rank_name, local_rank_name, size_name))
    if local_size_name is not None:
        local_world_size = whole_number(local_size_name, environ[local_size_name])
    check_below(rank_name, rank, size_name, size)
    check_below(local_rank_name, local_rank, local_size_name or "the tasks of this node", local_world_size)
    if local_world_size > size:
        raise LaunchError(
            f"{local_size_name} must be at most {size_name}, which is {size}, but is {local_world_size}; unset the"
            " variables of another launcher"
        )
    host, port = address or _address(environ)
    return LaunchEnvironment(launcher, rank, local_rank, size, local_world_size, host, port)


def check_below(name: str, value: int, limit_name: str, limit: int) -> None:
    """Refuse a number that is not below a limit."""
    if value >= limit:
        raise LaunchError(f"{name} must be below {limit_name}, which is {limit}, but is {value}")


def whole_number(name: str, value: str) -> int:
    """Return the number in a variable.

    Raises:
        LaunchError: it is no whole number.
    """
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
    return environ["MASTER_ADDR"], port_of(environ)


def port_of(environ: Mapping[str, str]) -> int:
    """Return MASTER_PORT, which must be set.

    Raises:
        LaunchError: it is no port.
    """
    port = whole_number("MASTER_PORT", environ["MASTER_PORT"])
    if not 0 < port < 2**16:
        raise LaunchError(f"MASTER_PORT must be between 1 and 65535, but is {port}")
    return port
