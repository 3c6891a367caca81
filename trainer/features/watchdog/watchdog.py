"""Watchdog, which detects a stalled run, reports the position of every rank, and ends the run.

A collective with a missing rank waits without a message, so a thread on each rank watches the heartbeats. After a
stall, each rank writes its stacks beside its status file. The lowest rank with stacks reports all, and all ranks exit.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

from trainer.base.disk import within
from trainer.base.errors import ExitCode, TrainerError
from trainer.base.text import for_terminal
from trainer.observe.builders import ObserverParts
from trainer.observe.heartbeat import Heartbeat, Status, ranks_folder, read_statuses
from trainer.observe.observer import Observer
from trainer.ranks.report import Report

_REPORT_SECONDS = 5.0  # to show the end of the run, which may hang too
_DISK_SECONDS = 30.0  # for one look at the folder of the run
_ANSWER_SECONDS = 60.0  # to wait for the stacks of other ranks, and to report them
_NO_ANSWER = "no answer: it is stopped or its machine is gone"


def observer(parts: ObserverParts) -> Watchdog:
    """Return the watchdog of a rank."""
    seconds = parts.recipe.parallel.stall_timeout.seconds
    return Watchdog(parts.heartbeat, seconds, parts.environment.error_file, parts.report_end)


class Watchdog(Observer):
    """Observer that ends this process if no rank makes progress; one slow rank is not enough.

    Args:
        error_file: the file of this rank's error, which `trainer run` reads; None: standard error.
        report_end: reports the end of the run to its observers, given the reason.
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        timeout_seconds: float,
        error_file: Path | None,
        report_end: Callable[[str], object],
    ) -> None:
        self._heartbeat = heartbeat
        self._timeout = timeout_seconds
        self._error_file = error_file
        self._report_end = report_end
        self._pause = min(1.0, timeout_seconds / 10)
        self._last_seen: dict[int, Status] = {}
        self._seen_since = 0.0  # by the monotonic clock
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def doing(self, step: int, what: str) -> None:
        # From the first activity on: by then the heartbeat has begun.
        if not (self._ended.is_set() or self._thread.is_alive()):
            self._thread.start()

    def close(self) -> None:
        self._ended.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            # No longer, because the thread may wait for a disk that does not answer.
            self._thread.join(self._pause)

    def _watch(self) -> None:
        beats, still_seconds, before = 0, 0.0, time.monotonic()
        while not self._ended.wait(self._pause):
            now = time.monotonic()
            # A gap does not count: a process that was suspended and continues is not stalled.
            still_seconds += min(now - before, 2 * self._pause)
            before = now
            if self._heartbeat.beats != beats:
                beats, still_seconds = self._heartbeat.beats, 0.0
            # The disk is asked only when this rank has stood still itself, since the look reads the files of all
            # machines.
            elif still_seconds >= self._timeout and self._asked_of_disk(self._all_stand_still):
                if self._asked_of_disk(partial(self._answer, beats), _ANSWER_SECONDS):
                    _leave()
                still_seconds = 0.0

    def _asked_of_disk(self, question: Callable[[], bool], more_seconds: float = 0.0) -> bool:
        """Return the answer to a question that reads the run folder; end this process if none comes."""
        answer = within(_DISK_SECONDS + more_seconds, question, otherwise=None)
        if answer is None:
            message = (
                f"rank {self._heartbeat.rank} has made no progress for {self._timeout:g} seconds"
                f" (`parallel.stall_timeout`), and the folder of the run does not answer\n{_stacks(self._thread)}"
            )
            # By the descriptor, because the thread that hangs may hold the lock of the stream.
            os.write(sys.stderr.fileno(), for_terminal(f"error: {message}\n").encode(errors="backslashreplace"))
            _leave()
        return answer

    def _all_stand_still(self) -> bool:
        """Return whether no rank has made progress for the timeout, also if the clock of a machine was set back."""
        statuses, now = self._statuses(), time.monotonic()
        if statuses != self._last_seen:
            self._last_seen, self._seen_since = statuses, now
        newest = max((status.time for status in statuses.values()), default=0.0)
        return time.time() - newest >= self._timeout or now - self._seen_since >= self._timeout

    def _answer(self, beats: int) -> bool:
        """Write a stack, wait for those of other ranks, and report them; return False if it makes progress again."""
        own = self._stack_file(self._heartbeat.rank)
        with suppress(OSError):  # on a full disk
            new = own.with_suffix(".new")
            new.write_text(_stacks(self._thread), encoding="utf-8")
            new.replace(own)  # others see it when it is complete
        deadline = time.monotonic() + min(30.0, max(2.0, self._timeout / 4))
        while time.monotonic() < deadline:
            if self._heartbeat.beats != beats:
                own.unlink(missing_ok=True)
                return False
            statuses = self._statuses()
            if all(self._stack_file(rank).exists() for rank in statuses):
                break
            time.sleep(min(0.2, self._pause))
        statuses = self._statuses()
        # All ranks compute the reporter from the same files, without a message.
        stacks = {rank: _text(self._stack_file(rank)) for rank in statuses}
        reporter = min((rank for rank, stack in stacks.items() if stack), default=self._heartbeat.rank)
        if self._heartbeat.rank != reporter:
            time.sleep(2 * _REPORT_SECONDS)  # an agent ends all ranks when one exits, so the reporter must be first
        else:
            self._report(stall_message(statuses, stacks, self._timeout, time.time()))
        self._heartbeat.leave()
        return True

    def _report(self, message: str) -> None:
        if self._error_file is not None:
            Report(self._heartbeat.rank, TrainerError.of_lines(message), is_of_all=True).write(self._error_file)
        reporting = threading.Thread(target=self._report_end, args=(message.splitlines()[0],), daemon=True)
        reporting.start()
        reporting.join(_REPORT_SECONDS)
        if self._error_file is None:
            os.write(sys.stderr.fileno(), for_terminal(f"error: {message}\n").encode(errors="backslashreplace"))

    def _statuses(self) -> dict[int, Status]:
        return read_statuses(self._heartbeat.run_folder)

    def _stack_file(self, rank: int) -> Path:
        return ranks_folder(self._heartbeat.run_folder) / f"rank-{rank:05d}.stack"


def stall_message(statuses: Mapping[int, Status], stacks: Mapping[int, str], timeout_seconds: float, now: float) -> str:
    """Return the position of every rank; equal stacks of main threads appear once.

    Args:
        stacks: the stacks of each rank's threads, the main thread first; empty for a rank without a stack file.
        now: seconds since the epoch.
    """
    lines = [f"no rank has made any progress for {timeout_seconds:g} seconds (`parallel.stall_timeout`)"]
    for rank, status in statuses.items():
        seconds = max(0.0, now - status.time)
        line = f"rank {rank} on {status.host}, process {status.pid}: {status}, {seconds:.0f} s since its last progress"
        lines.append(line if stacks.get(rank) else f"{line}; {_NO_ANSWER}")
    by_stack: dict[str, list[int]] = {}
    for rank in statuses:
        if stack := stacks.get(rank, ""):
            # The main thread comes first in each file, up to the first empty line.
            by_stack.setdefault(stack.split("\n\n")[0], []).append(rank)
    for stack, ranks in by_stack.items():
        lines += [f"main thread of rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}:", stack]
    return "\n".join(lines)


def _stacks(without: threading.Thread) -> str:
    """Return the Python stacks of all threads, the main thread first, with empty lines between."""
    main = threading.main_thread()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    # The thread of the watchdog itself says nothing about the stall.
    order = sorted((ident for ident in frames if ident != without.ident), key=lambda ident: ident != main.ident)
    blocks = []
    for ident in order:
        stack = "".join(traceback.format_stack(frames[ident])).rstrip()
        blocks.append(stack if ident == main.ident else f"thread {names.get(ident, ident)}:\n{stack}")
    return "\n\n".join(blocks)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""


def _leave() -> NoReturn:
    """End the process and its data workers although the main thread hangs."""
    for child in multiprocessing.active_children():
        # `os._exit` runs no exit handlers, so workers would outlive this process.
        child.kill()
    os._exit(ExitCode.FAILED)
