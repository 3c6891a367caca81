"""Data loaders: one `RankBatch` for each optimizer step, one `Microbatch` for each forward pass of an evaluation."""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import signal
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader

from trainer.base.errors import TrainerError, UsageError
from trainer.base.processes import ending
from trainer.data.collate import Batching, collate
from trainer.data.order import GlobalOrder, IndexArray
from trainer.data.rank_rows import RowChunk, partition, partition_by_tokens
from trainer.data.split import EncodedSplit
from trainer.data.workers import ignore_stop_signals, stop_signals_held
from trainer.parallel.microbatch import Microbatch, RankBatch, TokenMasking, copied_ahead
from trainer.recipe.plan import BatchPlan

_DEATH_SECONDS = 1.0  # time for a worker to exit after its connection has closed


@dataclass(frozen=True)
class StepRows:
    """The rows of one global batch.

    Attributes:
        row_ids: their indices in it, in the order of the batch.
        draw: the number of the draw of masks, which differs if rows come again.
        place: the place of the next row; None: the number of consumed rows gives it.
    """

    split: EncodedSplit
    row_ids: IndexArray
    draw: int
    place: tuple[int, int, int] | None = None


class TrainingRows(Protocol):
    """The rows of all global batches."""

    def first_step(self) -> int:
        """Return the number of the first step that is left, from 0."""
        ...

    def row_ids(self, step: int) -> IndexArray:
        """Return the numbers of the rows of a global batch in the training split."""
        ...

    def of_step(self, step: int) -> StepRows:
        """Return the rows of a global batch."""
        ...

    def close(self) -> None:
        """Remove files that only this training needs, after its last step."""
        ...


class SplitRows:
    """The rows of all global batches of an encoded split.

    Args:
        start_sample: the number of rows consumed before, over all ranks and epochs.

    Raises:
        UsageError: no global batch starts at `start_sample`.
    """

    def __init__(self, split: EncodedSplit, order: GlobalOrder, start_sample: int = 0) -> None:
        self._split, self._order = split, order
        # Counted in samples and not in steps, so that a changed split is noticed.
        epoch, index = order.position(start_sample)
        self._first_step = epoch * order.steps_per_epoch + index

    def first_step(self) -> int:
        return self._first_step

    def row_ids(self, step: int) -> IndexArray:
        return self._order.batch(*divmod(step, self._order.steps_per_epoch))

    def of_step(self, step: int) -> StepRows:
        return StepRows(self._split, self.row_ids(step), step // self._order.steps_per_epoch)

    def close(self) -> None:
        pass


@dataclass(eq=False)
class TrainLoader:
    """Loader of this rank's part of the remaining global batches.

    Every iteration starts at the first step of `rows`.

    Args:
        data_rank: the data-parallel rank; ranks of one model replica share it.
        total_steps: the number of optimizer steps of the whole training, with those already done.
        num_workers: the number of processes that prepare batches; 0: the rank prepares them.
        pin_memory: whether to copy batches into page-locked memory, for asynchronous copies to a GPU.
        masking: makes labels from tokens, different ones in each epoch; None: the split has labels.
        ahead_to: the GPU to which microbatches are copied one ahead, from page-locked memory; None: none begin here.

    Raises:
        UsageError: a row is longer than a microbatch.
        TrainerError: a worker died during the iteration.
    """

    rows: TrainingRows
    plan: BatchPlan
    data_rank: int
    batching: Batching
    total_steps: int
    num_workers: int = 0
    pin_memory: bool = False
    masking: TokenMasking | None = None
    ahead_to: torch.device | None = None
    _kept: dict[int, RankBatch] = field(default_factory=dict, init=False, repr=False)  # by step, until they are used

    @property
    def _steps(self) -> range:
        return range(self.rows.first_step(), self.total_steps)

    def __len__(self) -> int:
        """Return the number of remaining optimizer steps."""
        return len(self._steps)

    def row_ids(self, step: int) -> list[int]:
        """Return the split indices of the rows of the global batch of `step` (from 0), over all ranks."""
        return [int(row) for row in self.rows.row_ids(step)]

    def batch(self, step: int) -> RankBatch:
        """Return the part of this rank of the global batch of `step` (from 0); without workers, iterations share it."""
        microbatches = self[step]
        if not self.num_workers:
            self._kept[step] = microbatches
        return microbatches

    def __iter__(self) -> Iterator[RankBatch]:
        batches = _load(self, self._steps, self.num_workers, self.pin_memory)
        yield from batches if self.ahead_to is None else copied_ahead(batches, self.ahead_to)
        self.rows.close()

    def __getitem__(self, step: int) -> RankBatch:
        if step in self._kept:
            # Made for a preview; popped, so that it does not stay in memory.
            return self._kept.pop(step)
        rows = self.rows.of_step(step)
        split, row_ids = rows.split, rows.row_ids
        require_fitting_rows(split, self.plan, row_ids)
        chunks = self._chunks(split, row_ids)
        # The stages of a pipeline need microbatches of one width: that of the longest row of this rank.
        together = np.concatenate([row_ids[chunk.places] for chunk in chunks]) if self.plan.equal_widths else None
        masking = self.masking and self.masking.at(step, self.total_steps)
        microbatches = [
            collate(split, row_ids[part.places], self.batching, part.places, part.filler, masking, rows.draw, together)
            for part in chunks
        ]
        return RankBatch(microbatches, len(row_ids), split.num_tokens(row_ids), rows.place)

    def _chunks(self, split: EncodedSplit, row_ids: IndexArray) -> list[RowChunk]:
        plan = self.plan
        if plan.micro_batch_tokens is not None:
            widths = split.widths(row_ids, padded=not plan.padding_free)
            return partition_by_tokens(
                widths, self.data_rank, plan.data_parallel_size, plan.micro_batch_tokens, plan.padding_free
            )
        shortest = int(split.lengths_of(row_ids).argmin())  # the cheapest row to repeat
        return partition(len(row_ids), self.data_rank, plan.data_parallel_size, plan.micro_batch_size, shortest)


class EvalLoader:
    """Loader of this rank's part of a whole split.

    Over all ranks, every row is in exactly one microbatch, apart from fillers. `Microbatch.rows` are row ids. Every
    rank has the same number of microbatches. The longest rows come first: a batch that does not fit in memory fails
    at once.

    Args:
        num_workers: the number of processes that prepare batches; 0: the rank prepares them.
        masking: makes labels from tokens, the same ones at every evaluation; None: the split has labels.

    Raises:
        TrainerError: a worker died during the iteration.
    """

    def __init__(
        self,
        split: EncodedSplit,
        batch_size: int,
        data_rank: int,
        data_parallel_size: int,
        batching: Batching,
        num_workers: int = 0,
        pin_memory: bool = False,
        masking: TokenMasking | None = None,
    ) -> None:
        self._split, self._batching, self._masking = split, batching, masking
        # Rows of similar length stand together, so little is padded.
        self._row_ids = np.argsort(-split.lengths, kind="stable")
        self._chunks = partition(len(split), data_rank, data_parallel_size, batch_size, filler_place=len(split) - 1)
        self._num_workers, self._pin_memory = num_workers, pin_memory

    def __len__(self) -> int:
        """Return the number of microbatches of this rank with fillers, which is the same on every rank."""
        return len(self._chunks)

    def __iter__(self) -> Iterator[Microbatch]:
        return _load(self, range(len(self)), self._num_workers, self._pin_memory)

    def __getitem__(self, index: int) -> Microbatch:
        chunk = self._chunks[index]
        row_ids = self._row_ids[chunk.places]
        return collate(self._split, row_ids, self._batching, row_ids, chunk.filler, self._masking)


def require_fitting_rows(split: EncodedSplit, plan: BatchPlan, row_ids: IndexArray | None = None) -> None:
    """Refuse training rows with more tokens than a microbatch may have.

    Args:
        row_ids: the rows to look at; None: all.

    Raises:
        UsageError: there is one.
    """
    if plan.micro_batch_tokens is None:
        return
    rows = np.arange(len(split)) if row_ids is None else row_ids
    tokens = split.widths(rows, padded=not plan.padding_free).sum(axis=1)
    longest = int(tokens.argmax())
    if tokens[longest] > plan.micro_batch_tokens:
        raise UsageError(
            f"`training.micro_batch_tokens` must be at least the {tokens[longest]:,} tokens of the longest training row"
            f" ({longest + 1}), but is {plan.micro_batch_tokens:,}; raise it, or lower `data.max_length`"
        )


def _load(batches: Any, keys: Sequence[int], num_workers: int, pin_memory: bool) -> Iterator[Any]:
    """Yield `batches[key]` for each key, in order.

    Raises:
        TrainerError: a worker died, or shared memory is full.
    """
    # A "batch" of torch's loader is one index here, and `__getitem__` returns a whole batch.
    loader = DataLoader(
        batches,
        sampler=keys,
        batch_size=None,
        collate_fn=_identity,
        num_workers=num_workers,
        pin_memory=pin_memory,
        worker_init_fn=_init_worker,
        generator=torch.Generator(),  # otherwise the loader draws from the default generator, which dropout may use
    )
    # To tell the workers of this loader from others of the process.
    before = multiprocessing.active_children()
    try:
        if num_workers:
            multiprocessing.Lock()  # fails before torch has half an iterator, which would show a traceback
        with stop_signals_held():  # also for the workers, until they ignore the signals
            iterator = iter(loader)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise TrainerError(_no_shared_memory(num_workers)) from error
        raise
    # After the iterator is made, because torch sets its handler then.
    _name_deaths(num_workers)
    workers = [process for process in multiprocessing.active_children() if process not in before]
    # At exit, multiprocessing sends SIGTERM to the workers, which ignore it, and would wait for them forever.
    weakref.finalize(iterator, _kill, workers)
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            return
        except (RuntimeError, OSError, EOFError) as error:  # from the loader or a broken connection
            if dead := _dead(workers):
                raise TrainerError(_worker_death([worker.exitcode or 0 for worker in dead], num_workers)) from error
            raise
        yield batch


def _identity(batch: Any) -> Any:
    return batch


def _init_worker(worker_id: int) -> None:
    ignore_stop_signals()
    # Python's own method prints the error and drops the batch, for which the rank would wait forever.
    Queue._on_queue_feeder_error = staticmethod(_end_worker)  # type: ignore[attr-defined]


def _end_worker(error: Exception, batch: object) -> None:
    """End this worker, which could not send a batch: torch copies its tensors into shared memory."""
    is_full = "No space left" in str(error) or "shared memory" in str(error)
    if not is_full:
        traceback.print_exception(error)
    # The rank reads the reason from the exit code, because the queue cannot carry it.
    os._exit(errno.ENOSPC if is_full else 1)


def _name_deaths(num_workers: int) -> None:
    """Let torch's handler of dead workers, which raises wherever the rank is, raise an error with a remedy."""
    # Torch's handler; signals can be set in the main thread only.
    report = signal.getsignal(signal.SIGCHLD)
    is_ours = isinstance(report, partial) and report.func is _report_death
    if callable(report) and not is_ours and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, partial(_report_death, report, num_workers))


def _report_death(report: Callable[[int, Any], object], num_workers: int, number: int, frame: Any) -> None:
    try:
        report(number, frame)
    except RuntimeError as error:
        # torch names the dead worker in the text of its error only.
        pid = re.search(r"\(pid (\d+)\)", str(error))
        # It stays in this state until its loader asks for it.
        state = pid and os.waitid(os.P_PID, int(pid[1]), os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if not state:
            raise
        code = state.si_status if state.si_code == os.CLD_EXITED else -state.si_status
        raise TrainerError(_worker_death([code], num_workers)) from error


def _kill(workers: Sequence[BaseProcess]) -> None:
    alive = [worker for worker in workers if worker.is_alive()]
    if alive:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would report these deaths as an error
    for worker in alive:
        worker.kill()


def _dead(workers: Sequence[BaseProcess]) -> list[BaseProcess]:
    for sentinel in wait([worker.sentinel for worker in workers], _DEATH_SECONDS):
        next(worker for worker in workers if worker.sentinel == sentinel).join(_DEATH_SECONDS)
    return [worker for worker in workers if worker.exitcode is not None]


def _no_shared_memory(num_workers: int) -> str:
    return (
        f"shared memory (/dev/shm) is full, but `data.num_workers` is {num_workers}, and these processes send batches"
        " through it; delete files of dead programs there, give the container more (--shm-size=8g), or set"
        " `data.num_workers` to 0"
    )


def _worker_death(exit_codes: Sequence[int], num_workers: int) -> str:
    codes = sorted(set(exit_codes))
    if errno.ENOSPC in codes:
        return _no_shared_memory(num_workers)
    return (
        f"a process of `data.num_workers` ({num_workers}) died: {', '.join(map(ending, codes))}; SIGKILL often means"
        " that memory ran out, SIGBUS that shared memory (/dev/shm) did: give it more, or set `data.num_workers` to 0"
    )
