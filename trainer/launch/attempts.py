"""Attempts of local ranks: their start, their restarts after failures, and the error nearest to the cause.

A rank writes its error to a file, and the first failure is shown once, after all other output.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.base import extensions
from trainer.base.collector import importing
from trainer.base.disk import within
from trainer.base.errors import ExitCode, LostPeerError, StoppedError, TrainerError
from trainer.base.scratch import scratch_folder
from trainer.base.terminal import say
from trainer.base.text import one_line
from trainer.launch.processes import Ended, LocalRanks, StartMethod, Stop, stop_signals
from trainer.launch.rank_job import Job, set_threads
from trainer.observe.heartbeat import Status, read_statuses
from trainer.ranks.environment import LaunchEnvironment
from trainer.ranks.report import Report, read_reports
from trainer.ranks.stopping import SHOW_CURSOR

if TYPE_CHECKING:
    from trainer.recipe.reading.loading import ResolvedRecipe

_DISK_SECONDS = 5.0  # to read the positions of the ranks: the file server of their folder may hang
_RESTART_SECONDS = 1.0  # pause between two attempts, because the old ranks may still hold resources


def run_ranks(
    resolved: ResolvedRecipe,
    number: int,
    max_restarts: int,
    job: Job,
    rank: LaunchEnvironment | None,
    method: StartMethod,
) -> int:
    """Run `number` local ranks to their end, with restarts after failures; return their exit code.

    With `rank`, run that rank alone in one new process; other processes run the other ranks.
    """
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
