"""Start of the local ranks of a run, and entry of a rank that a launcher has started.

Without GPUs, local ranks are forks of this process and need not import torch again. A rank writes its error to a file,
and the first failure is shown once, after all other output.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from trainer.base import extensions
from trainer.base.collector import importing
from trainer.base.disk import within
from trainer.base.errors import ExitCode, LaunchError, LostPeerError, StoppedError, TrainerError
from trainer.base.scratch import scratch_folder
from trainer.base.terminal import say
from trainer.base.text import one_line
from trainer.observe.heartbeat import Status, read_statuses
from trainer.observe.observer import NO_CALLBACKS, Callbacks
from trainer.ranks.environment import LaunchEnvironment, detect, threads_per_rank
from trainer.ranks.report import Report, read_reports
from trainer.ranks.stopping import SHOW_CURSOR, stop_before_training
from trainer.recipe.plan import plan_run
from trainer.recipe.strategies import STRATEGIES, Strategy

if TYPE_CHECKING:
    from trainer.launch.processes import Ended, StartMethod, Stop
    from trainer.recipe.reading.loading import ResolvedRecipe

Job: TypeAlias = "Callable[[ResolvedRecipe, LaunchEnvironment], int]"
"""The work of a rank, which returns its exit code; picklable."""


@dataclass(frozen=True)
class Training:
    """The job that trains, with the callbacks of all ranks."""

    callbacks: Callbacks = NO_CALLBACKS

    def __call__(self, resolved: ResolvedRecipe, environment: LaunchEnvironment) -> int:
        """Train as this rank, and return the exit code."""
        if environment.elastic_nodes is not None:
            with importing():
                from trainer.recipe.elastic_launch import elastic_launch

                train = extensions.resolved(elastic_launch(environment.elastic_nodes).train)
            return int(train(resolved, environment, self.callbacks))
        with importing():
            from trainer.training.run import run

        return run(resolved, environment, self.callbacks)


_TRAINING = Training()
_DISK_SECONDS = 5.0  # to read the positions of the ranks: the file server of their folder may hang
_RESTART_SECONDS = 1.0  # pause between two attempts, because the old ranks may still hold resources


def run_or_join(resolved: ResolvedRecipe, processes: int | None, max_restarts: int = 0, job: Job = _TRAINING) -> int:
    """Run a recipe on `processes` ranks, or as a rank of the launcher that started this process.

    Args:
        processes: the number of ranks; None: one for each GPU, or one process without GPUs.

    Returns:
        The exit code.

    Raises:
        RecipeError: the recipe does not fit on that many ranks.
        LaunchError: the ranks contradict the request or the devices.
        TrainerError: a rank failed; the error is of the class that the rank raised.
    """
    if resolved.chain is not None:
        return resolved.chain.run(processes, max_restarts, job)
    with stop_before_training():
        # Errors of the recipe and the launch come before the first rank starts.
        environment, number = plan_start(resolved, processes, max_restarts)
        if environment.has_ranks:  # its launcher ends all ranks at the first error, and waits for no advice
            return join(resolved, environment, job)
        with extensions.around("launch"):
            if number is None:
                return join(resolved, environment, job)
            return _start(resolved, number, max_restarts, job)


def number_of_ranks(processes: int | None) -> int:
    """Return the number of ranks that `run_or_join` would use for a strategy of several ranks."""
    environment = detect()
    if environment.has_ranks:
        return environment.world_size
    return _number_of_processes(environment, processes, STRATEGIES["ddp"])


def plan_start(
    resolved: ResolvedRecipe, processes: int | None, max_restarts: int
) -> tuple[LaunchEnvironment, int | None]:
    """Return the environment of this process, and the number of ranks to start, None if it is a rank itself.

    Raises:
        RecipeError: the recipe does not fit on that many ranks.
        LaunchError: the ranks contradict the request or the devices.
    """
    environment = detect()
    recipe = resolved.recipe
    if environment.feature is not None:
        packages = {name: row.package for name, row in STRATEGIES.items()}
        environment.feature.check(recipe.precision, recipe.parallel.strategy, packages)
    if environment.has_ranks:
        if processes not in (None, environment.world_size):
            raise LaunchError(
                f"--processes is {processes}, but {environment.launcher} started {environment.world_size} ranks;"
                " drop --processes"
            )
        if max_restarts:
            raise LaunchError(
                f"--max-restarts is {max_restarts}, but {environment.launcher} started the ranks, and only their"
                " launcher can restart them; drop --max-restarts, and let the launcher or the batch system restart"
            )
        if environment.elastic_nodes is not None:
            from trainer.recipe.elastic_launch import elastic_launch

            elastic_launch(environment.elastic_nodes).check(recipe, environment)
        else:
            plan_run(recipe, environment.world_size, environment.local_world_size)
        if _num_gpus() != 1:  # a batch system may show each rank only its own GPU; the ranks compare them
            _require_devices(environment.local_world_size)
        return environment, None
    number = _number_of_processes(environment, processes, STRATEGIES[recipe.parallel.strategy])
    # Planned here too, so that a recipe that does not fit fails once, and before any rank starts.
    plan_run(recipe, number)
    _require_devices(number)
    return environment, None if number == 1 and not max_restarts else number


def _number_of_processes(environment: LaunchEnvironment, processes: int | None, strategy: Strategy) -> int:
    if processes is not None:
        if processes < 1:
            raise LaunchError(f"--processes must be at least 1, but is {processes}")
        return processes
    if environment.is_alone and environment.feature is not None:
        return environment.feature.local_ranks(environment)
    return strategy.local_ranks(_num_gpus())


def _num_gpus() -> int:
    with importing():
        import torch

    return torch.cuda.device_count()


def _require_devices(local_ranks: int) -> None:
    """Require one GPU for each rank if the machine has GPUs; ranks on the same GPU would wait for each other."""
    gpus = _num_gpus()
    if 0 < gpus < local_ranks:
        raise LaunchError(
            f"{local_ranks} processes need {local_ranks} GPUs, but this machine shows {gpus};"
            f" use at most {gpus}, or set CUDA_VISIBLE_DEVICES to nothing to train on the CPU"
        )


def join(resolved: ResolvedRecipe, environment: LaunchEnvironment, job: Job = _TRAINING) -> int:
    """Run the rank of this process; return its exit code."""
    set_threads(environment)
    return job(resolved, environment)


def set_threads(environment: LaunchEnvironment) -> None:
    """Share the cores of this machine among its ranks."""
    with importing():
        import torch

    if environment.world_size > 1 and (threads := threads_per_rank(environment)) is not None:
        torch.set_num_threads(threads)


def _start(
    resolved: ResolvedRecipe, number: int, max_restarts: int, job: Job, rank: LaunchEnvironment | None = None
) -> int:
    """Run `number` local ranks to their end, with restarts after failures; return their exit code."""
    method = _start_method()
    from trainer.launch.processes import stop_signals  # one process alone starts no other

    with stop_signals() as stop:
        if method == "fork":
            with importing():
                importlib.import_module("trainer.training.run")  # one import for all ranks and restarts
        for restart in range(1, max_restarts + 1):
            try:
                return _attempt(resolved, number, method, stop, job, rank)
            except TrainerError as error:
                # The other errors would come again: those of the user, non-finite losses, and stops.
                if error.exit_code != ExitCode.FAILED or stop.signal is not None:
                    raise
                restarts = f"restart {restart} of {max_restarts}: all ranks start again from the last checkpoint"
                say(*error.lines, restarts, err=True)
            time.sleep(_RESTART_SECONDS)
            if stop.signal is not None:
                raise StoppedError(
                    f"stopped by {stop.signal.name} before the restart; the last checkpoint is unchanged"
                )
            # The first attempt may have left checkpoints, which `resume` never would refuse.
            resolved = _resuming(resolved)
        return _attempt(resolved, number, method, stop, job, rank)


def run_on_fresh_ranks(resolved: ResolvedRecipe, number: int, job: Job, rank: LaunchEnvironment | None = None) -> int:
    """Run a job on `number` new local processes, even if it is one, and return the exit code.

    With `rank`, run that rank alone in one new process; other processes run the other ranks.

    Raises:
        RecipeError: the recipe does not fit on that many ranks.
        LaunchError: there are too few GPUs.
        TrainerError: a rank failed; the error is of the class that the rank raised.
        StoppedError: a signal arrived before the first step.
    """
    local = rank.local_world_size if rank else number
    plan_run(resolved.recipe, number, local)
    if rank is None or _num_gpus() != 1:  # see `plan_start`
        _require_devices(local)
    return _start(resolved, number, 0, job, rank)


def _resuming(resolved: ResolvedRecipe) -> ResolvedRecipe:
    """Return the recipe of a restart, which resumes from the checkpoints of this run in the folder."""
    recipe = resolved.recipe
    if recipe.checkpoint.resume == "auto":
        return resolved
    checkpoint = recipe.checkpoint.model_copy(update={"resume": "auto"})
    return replace(resolved, recipe=recipe.model_copy(update={"checkpoint": checkpoint}))


def _attempt(
    resolved: ResolvedRecipe, number: int, method: StartMethod, stop: Stop, job: Job, rank: LaunchEnvironment | None
) -> int:
    """Run `number` local ranks once, or one rank of a job; return their exit code."""
    from trainer.launch.processes import LocalRanks

    if stop.signal is not None:
        raise _stopped_early(stop.signal)
    with scratch_folder() as folder:
        registered = extensions.needed_elsewhere() if method == "spawn" else []  # forks have it
        ranks = LocalRanks(_run_rank, _Work(resolved, job, registered), number, method, folder, rank)
        ends = ranks.wait(stop)
        failures = [end for end in ends if end.has_failed]
        if not failures:
            # A rank that has not failed is done (0), or stopped with a checkpoint (75), which is then the end of the
            # run.
            return max(end.exit_code for end in ends)
        if sys.stdout.isatty():  # a killed rank 0 leaves the cursor hidden
            os.write(sys.stdout.fileno(), SHOW_CURSOR)
        # Killed ranks leave no reports, and their ends follow from the stop.
        if stop.signal is not None and ranks.was_killed:
            raise TrainerError(
                f"stopped by {stop.signal.name}; the ranks were killed before they had saved; earlier checkpoints"
                " are unchanged"
            )
        # The positions of the ranks are in the folder of the run, on a disk that may be the cause of the failure.
        place, none = Path(resolved.recipe.checkpoint.folder), dict[int, Status]()
        statuses = within(_DISK_SECONDS, lambda: read_statuses(place), none)
        # The other ranks of a job leave their reports elsewhere.
        raise _error_of(failures[0], read_reports(folder), statuses, 0 if rank else number, stop)


def _start_method() -> StartMethod:
    """Return fork, which keeps torch imported, on Linux without GPUs: CUDA in use does not survive a fork."""
    return "spawn" if _num_gpus() or sys.platform != "linux" else "fork"


@dataclass(frozen=True)
class _Work:
    """The work of the local ranks; `registered` is that of `extensions.needed_elsewhere`."""

    resolved: ResolvedRecipe
    job: Job
    registered: Sequence[tuple[str, str, str]]


def _run_rank(work: _Work, environment: LaunchEnvironment) -> int:
    """Run one local rank; return its exit code, and write an error to the rank's error file."""
    try:
        extensions.load()  # a spawned rank has not loaded the recipe itself
        extensions.repeat(work.registered)
        set_threads(environment)
        with extensions.around("rank", work.resolved, environment):
            return work.job(work.resolved, environment)
    except TrainerError as caught:
        error = caught
    except Exception:
        error = TrainerError.of_lines(traceback.format_exc())
    assert environment.error_file is not None
    Report(environment.rank, error).write(environment.error_file)
    if environment.rank > 0 or isinstance(error, LostPeerError):
        # The first exit ends all ranks, so this rank lets rank 0 show its summary, or lets the cause exit first.
        time.sleep(1)
    return error.exit_code


def _stopped_early(number: signal.Signals) -> StoppedError:
    return StoppedError(f"stopped by {number.name} before the first step; nothing was lost")


def _error_of(
    first: Ended, reports: Sequence[Report], statuses: Mapping[int, Status], number: int, stop: Stop
) -> TrainerError:
    """Return the error nearest to the cause.

    If the first rank has no report, it died suddenly, and the others failed because of it. Otherwise the earliest
    report is nearest to the cause.
    """
    if first.rank in (report.rank for report in reports):
        return _first_error(reports, statuses, number)
    if stop.signal is not None and first.exit_code == -signal.SIGTERM:
        return _stopped_early(stop.signal)
    rank = _described(first.rank, statuses, first.pid)
    if first.exit_code < 0:
        reason = "; the system does so when memory runs out" if first.exit_code == -signal.SIGKILL else ""
        return TrainerError(f"{rank} was killed by {_signal_name(-first.exit_code)}{reason}")
    return TrainerError(f"{rank} exited with code {first.exit_code} and no error message")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _described(rank: int, statuses: Mapping[int, Status], pid: int | None = None) -> str:
    """Describe a rank, with its progress if it had begun to train; `pid` is its process if that is known."""
    status, host = statuses.get(rank), socket.gethostname()
    if status is not None and pid in (None, status.pid):
        return f"rank {rank} (process {status.pid} on {host}), {status},"
    return f"rank {rank}" if pid is None else f"rank {rank} (process {pid} on {host})"


def _first_error(reports: Sequence[Report], statuses: Mapping[int, Status], number: int) -> TrainerError:
    """Return the error of the earliest report, and name ranks without a report, which may have been killed before."""
    first, error = reports[0], reports[0].error
    if error.exit_code is not ExitCode.FAILED or first.is_of_all:
        return error
    silent = sorted(set(range(number)) - {report.rank for report in reports})
    names = [_described(rank, statuses) for rank in silent]
    hint = f"\n{', '.join(names)} left no error; the system may have killed it" if silent else ""
    is_shared = sum(str(report.error) == str(error) for report in reports) > 1  # the error of any rank, on all of them
    who = "" if is_shared else f"{_described(first.rank, statuses)} failed:\n"
    message = "\n".join(map(one_line, error.lines))
    error.args = (f"{who}{message}{hint}",)
    error.has_lines = True
    return error
