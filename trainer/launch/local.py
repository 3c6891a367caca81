"""Starts the local ranks of a run, or joins the ranks that a launcher has started.

Ranks of our own run under torch's elastic agent, as forks of this process: they need not import torch again. Rank 0 has
the terminal; the other ranks' lines follow with their rank in front. A rank leaves its error in a file, so that the one
that failed first is shown, once, and last.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import psutil

from trainer.base.errors import ExitCode, LaunchError, LostPeerError, TrainerError
from trainer.observe.heartbeat import Status, read_statuses
from trainer.ranks.environment import LOCAL_ROLE, LaunchEnvironment, check_agrees, detect, threads_per_rank
from trainer.ranks.report import Kind, Report, read_reports
from trainer.recipe.plan import plan_run
from trainer.recipe.strategies import STRATEGIES, Strategy

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from trainer.reading.loading import ResolvedRecipe

GRACE_SECONDS = 60.0
"""What the ranks get to finish their step and save, between the signal that asks and the one that kills."""

_RESTART_SECONDS = 1.0  # between two attempts, for what the ranks of the one still hold
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class RankError(TrainerError):
    """A rank that we started failed; holds its message, and the exit code that it left with."""

    def __init__(self, message: str, exit_code: ExitCode) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def run_or_join(resolved: ResolvedRecipe, processes: int | None, max_restarts: int = 0) -> int:
    """Runs a recipe on `processes` ranks, or on those of the launcher that started this process; returns the exit code.

    Alone and without a number, it takes every GPU, or one process where there is none. Ranks that it starts, and that
    fail, it starts again from the last checkpoint, `max_restarts` times at most.

    Raises:
        RecipeError: the recipe does not fit on that many ranks.
        LaunchError: ranks and request, or ranks and devices, contradict each other.
        RankError: a rank failed.
    """
    environment = detect()
    recipe = resolved.recipe
    check_agrees(environment, precision=recipe.precision, strategy=recipe.parallel.strategy)
    if environment.has_ranks:
        if processes not in (None, environment.world_size):
            raise LaunchError(
                f"--processes is {processes}, but {environment.launcher} started {environment.world_size} ranks;"
                " drop --processes"
            )
        if max_restarts:
            raise LaunchError(
                f"--max-restarts is {max_restarts}, but {environment.launcher} started the ranks, and only what starts"
                " them can start them again; drop --max-restarts, and let the launcher or the batch system restart"
            )
        plan_run(recipe, environment.world_size, environment.local_world_size)
        _check_devices(environment.local_world_size)
        return _join(resolved, environment)
    number = _number_of_processes(environment, processes, STRATEGIES[recipe.parallel.strategy])
    plan_run(recipe, number)
    _check_devices(number)
    alone = number == 1 and not max_restarts
    return _join(resolved, environment) if alone else _start(resolved, number, max_restarts)


def _number_of_processes(environment: LaunchEnvironment, processes: int | None, strategy: Strategy) -> int:
    if processes is not None:
        if processes < 1:
            raise LaunchError(f"--processes must be at least 1, but is {processes}")
        return processes
    if environment.launcher == "sbatch":
        raise LaunchError(
            f"the batch job has {environment.world_size} tasks, but no srun started this process;"
            " use `srun trainer run ...`, or pass --processes for ranks on this node only"
        )
    if environment.launcher == "accelerate-single":
        return _asked_of_accelerate()
    return strategy.local_ranks(_num_gpus())


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _check_devices(local_ranks: int) -> None:
    """One GPU per rank where there are GPUs; ranks that share one would only wait for each other."""
    gpus = _num_gpus()
    if 0 < gpus < local_ranks:
        raise LaunchError(
            f"{local_ranks} processes need {local_ranks} GPUs, but this machine shows {gpus};"
            f" use at most {gpus}, or set CUDA_VISIBLE_DEVICES to nothing to train on the CPU"
        )


def _asked_of_accelerate() -> int:
    """The number of processes that `accelerate launch --cpu` was asked for, read as accelerate itself reads it.

    It starts a single one and passes the number on to nobody, so it is taken from its command line and its file.

    Raises:
        LaunchError: the command line is not to be seen, or asks for several machines.
    """
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    arguments = _arguments_of_accelerate()
    if arguments is None:
        raise LaunchError(
            "`accelerate launch` started one process, and how many it was asked for cannot be seen from here;"
            " pass --processes to `trainer run`, or --multi_gpu to `accelerate launch`, which starts all, on CPU too"
        )
    asked = launch_command_parser().parse_args(arguments)
    number, machines = asked.num_processes, asked.num_machines
    if asked.config_file is not None or not asked.cpu:
        with suppress(FileNotFoundError):  # no file: what accelerate was not told has its default
            config = load_config_from_file(asked.config_file)
            number, machines = number or config.num_processes, machines or config.num_machines
    if (machines or 1) > 1:
        raise LaunchError(
            "`accelerate launch` on CPU gives no ranks to several machines; add --multi_gpu, which does, on CPU too"
        )
    if (number or 1) > 1:
        sys.stderr.write(f"accelerate started one process of the {number} it was asked for: starting them here\n")
    return number or 1


def _arguments_of_accelerate() -> list[str] | None:
    """What follows `accelerate launch` on the command line of the nearest ancestor that is one."""
    names = ("accelerate", "accelerate-launch", "accelerate.commands.launch", "accelerate.commands.accelerate_cli")
    for ancestor in psutil.Process().parents():
        with suppress(psutil.Error):
            command: list[str] = ancestor.cmdline()
            # `python -m` stands in the command line as the module's name or, after a re-exec, as its file
            for index, word in enumerate(command[:4]):
                if Path(word).name in names or word.endswith(("accelerate/commands/launch.py", "accelerate_cli.py")):
                    rest = command[index + 1 :]
                    return rest[1:] if rest[:1] == ["launch"] else rest
    return None


def _join(resolved: ResolvedRecipe, environment: LaunchEnvironment) -> int:
    """Runs this process's rank."""
    import torch

    from trainer.training.run import run

    if environment.world_size > 1 and (threads := threads_per_rank(environment.local_world_size)) is not None:
        torch.set_num_threads(threads)
    return run(resolved, environment)


def _start(resolved: ResolvedRecipe, number: int, max_restarts: int) -> int:
    """Runs `number` local ranks to their end, again and again where they fail; returns their exit code."""
    for logger in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(logger).setLevel(logging.CRITICAL)  # we say ourselves what failed
    with _forwarded_signals() as stop:
        if _start_method() == "fork":
            importlib.import_module("trainer.training.run")  # once, instead of in each rank and again in each restart
        for restart in range(1, max_restarts + 1):
            try:
                return _attempt(resolved, number, stop)
            except RankError as error:
                if error.exit_code != ExitCode.FAILED or stop.signal is not None:
                    raise
                stop.has_failed = True
                sys.stderr.write(
                    f"{error}\nrestart {restart} of {max_restarts}: all ranks start again from the last checkpoint\n"
                )
            time.sleep(_RESTART_SECONDS)
            if stop.signal is not None:
                raise stop.before_training()
            resolved = _going_on(resolved)
        return _attempt(resolved, number, stop)


def _going_on(resolved: ResolvedRecipe) -> ResolvedRecipe:
    """The recipe of a restart: what lies in the folder by now is this run's own, so `never` has had its say."""
    recipe = resolved.recipe
    if recipe.checkpoint.resume == "auto":
        return resolved
    checkpoint = recipe.checkpoint.model_copy(update={"resume": "auto"})
    return replace(resolved, recipe=recipe.model_copy(update={"checkpoint": checkpoint}))


def _attempt(resolved: ResolvedRecipe, number: int, stop: _Stop) -> int:
    """Runs `number` local ranks under an elastic agent, once, and returns their exit code.

    The agent's own restarts are not for us: it would start a rank again that has refused its recipe.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with tempfile.TemporaryDirectory(prefix="trainer-") as folder, _stopped_ranks_end_with_others():
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=number,
            role=LOCAL_ROLE,
            run_id=LOCAL_ROLE,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",  # the agent's own store takes a free port, and the ranks share it
            local_addr="127.0.0.1",
            max_restarts=0,
            start_method=_start_method(),
            logs_specs=DefaultLogsSpecs(folder, tee=dict.fromkeys(range(1, number), Std.ALL)),
            log_line_prefix_template="[rank ${rank}] ",
            signals_to_handle="SIGQUIT",  # the others are forwarded; the agent would give up waiting after 30 s
        )
        sys.stdout.flush()  # or each fork would write again what this process has not yet written
        try:
            codes: dict[int, int] = elastic_launch(config, _run_rank)(resolved)
        except ChildFailedError as error:
            statuses = read_statuses(Path(resolved.recipe.checkpoint.folder))
            return _outcome(error.failures, read_reports(Path(folder)), statuses, number, stop)
    return next(filter(None, codes.values()), ExitCode.DONE)


@contextmanager
def _stopped_ranks_end_with_others() -> Iterator[None]:
    """Kills ranks that are stopped (SIGSTOP) once another one has ended: the agent's SIGTERM does not reach them."""
    done = threading.Event()

    def watch() -> None:
        seen: dict[int, psutil.Process] = {}
        while not done.wait(0.5):
            seen |= {rank.pid: rank for rank in psutil.Process().children()}
            if any(not _is_alive(rank) for rank in seen.values()):
                for rank in seen.values():
                    with suppress(psutil.Error, ProcessLookupError, PermissionError):
                        if rank.is_running() and rank.status() == psutil.STATUS_STOPPED:
                            os.killpg(rank.pid, signal.SIGKILL)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _is_alive(rank: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return bool(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE)
    return False


def _start_method() -> str:
    """A fork has torch already and saves its import; CUDA, once it was asked anything, does not survive one."""
    return "spawn" if _num_gpus() or sys.platform != "linux" else "fork"


def _run_rank(resolved: ResolvedRecipe) -> int:
    """The life of a rank under our own agent; what ends it badly is left in the rank's error file.

    When its agent dies it gets SIGINT (torch sees to that), and saves and leaves as after any signal.
    """
    agent = os.getppid()
    threading.Thread(target=_leave_without, args=(agent,), daemon=True).start()
    os.setsid()  # Ctrl-C in the terminal reaches the agent alone, which forwards it
    for number in _FORWARDED:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    environment = detect()
    kind: Kind = "error"
    try:
        returned = _join(resolved, environment)
        if os.getppid() != agent:
            os._exit(returned)  # nobody is left to take a return value; torch would wait for it to be taken
        return returned
    except TrainerError as error:
        code, message = error.exit_code, str(error)
        kind = "consequence" if isinstance(error, LostPeerError) else "error"
    except Exception:
        code, message = ExitCode.FAILED, traceback.format_exc()
    assert environment.error_file is not None
    Report(environment.rank, code, message, kind).write(environment.error_file)
    if environment.rank > 0 or kind == "consequence":
        # The agent ends all ranks when it sees one leave: rank 0 has an end to tell, and the cause is to be seen first.
        time.sleep(1)
    sys.exit(code)


def _leave_without(agent: int) -> None:
    """Ends a rank that has not stopped by itself after its agent's death, so that none is ever left behind."""
    while os.getppid() == agent:
        time.sleep(1)
    time.sleep(GRACE_SECONDS)
    os._exit(ExitCode.FAILED)


class _Stop:
    """The signal that asked the run to stop, if one came, and whether patience ended."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.killed = False
        self.has_failed = False  # an attempt before this one

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Asks the ranks to save and leave; kills them on a second Ctrl-C or after the grace."""
        if self.signal is None:
            self.signal = signal.Signals(number)
            ranks = psutil.Process().children()
            if not ranks:
                raise self.before_training()
            timer = threading.Timer(GRACE_SECONDS, self.kill)
            timer.daemon = True
            timer.start()
            for rank in ranks:
                with suppress(psutil.NoSuchProcess):
                    rank.terminate()  # the rank alone, not its group: its data loaders still serve it
        elif number == signal.SIGINT:
            self.kill()

    def before_training(self) -> RankError:
        """What a run ends with that was stopped before it trained, or before it did so again."""
        assert self.signal is not None
        if self.has_failed:
            return RankError(
                f"stopped by {self.signal.name} before the restart; the last checkpoint is as it was", ExitCode.STOPPED
            )
        return RankError(f"stopped by {self.signal.name} before training had begun; nothing was saved", ExitCode.FAILED)

    def kill(self) -> None:
        """Kills the ranks with all that they started; each leads its own process group."""
        self.killed = True
        for rank in psutil.Process().children():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.pid, signal.SIGKILL)


@contextmanager
def _forwarded_signals() -> Iterator[_Stop]:
    """Forwards what asks this process to stop to its ranks; what it was told to ignore stays ignored."""
    stop = _Stop()
    previous = {number: signal.getsignal(number) for number in _FORWARDED}
    try:
        for number, handler in previous.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, stop.handle)
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _outcome(
    failures: Mapping[int, ProcessFailure],
    reports: Sequence[Report],
    statuses: Mapping[int, Status],
    number: int,
    stop: _Stop,
) -> int:
    """Raises the error of the rank that failed first, or gives the exit code of one that left none.

    `failures` holds the rank that the agent saw end first. Where that one left no report of its own, it died without a
    word and brought the others down; else the earliest report is nearest to the cause.
    """
    rank, failure = next(iter(failures.items()))
    code = failure.exitcode
    if stop.killed:
        raise RankError(
            f"stopped by {_name(stop)}; the ranks were killed before they had saved",
            ExitCode.FAILED,
        )
    if rank in (report.rank for report in reports):
        raise _first_error(reports, statuses, number)
    if stop.signal is not None and code == -signal.SIGTERM:
        raise stop.before_training()
    if code < 0:
        raise RankError(
            f"{_described(rank, failure.pid, statuses)} was killed by {failure.signal_name()}"
            + ("; the system does so when memory runs out" if code == -signal.SIGKILL else ""),
            ExitCode.FAILED,
        )
    if code == ExitCode.FAILED:
        raise RankError(f"{_described(rank, failure.pid, statuses)} left with exit code 1 and no word", ExitCode.FAILED)
    return code


def _described(rank: int, pid: int, statuses: Mapping[int, Status]) -> str:
    """Which rank it was and how far it had come, where it had begun to train."""
    status = statuses.get(rank)
    how_far = f", {status}," if status is not None and status.pid == pid else ""
    return f"rank {rank} (process {pid} on {socket.gethostname()}){how_far}"


def _first_error(reports: Sequence[Report], statuses: Mapping[int, Status], number: int) -> RankError:
    """The error nearest to the cause; a bug's with its traceback, and with the ranks that may have died before it."""
    first = reports[0]
    code = ExitCode(first.exit_code)
    if code is not ExitCode.FAILED or first.kind == "stall":
        return RankError(first.message, code)
    silent = sorted(set(range(number)) - {report.rank for report in reports})
    names = [_described(rank, statuses[rank].pid, statuses) if rank in statuses else f"rank {rank}" for rank in silent]
    hint = f"\n{', '.join(names)} left no error; the system may have killed it" if silent else ""
    return RankError(f"{_described_report(first, statuses)} failed:\n{first.message}{hint}", code)


def _described_report(report: Report, statuses: Mapping[int, Status]) -> str:
    status = statuses.get(report.rank)
    return f"rank {report.rank}" if status is None else _described(report.rank, status.pid, statuses)


def _name(stop: _Stop) -> str:
    assert stop.signal is not None
    return stop.signal.name
