"""Steps with a non-finite loss or gradient: the rows of the training split behind it, and their ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trainer.base.text import listed
from trainer.engine.engine import Engine
from trainer.engine.results import StepResult
from trainer.observe.records import BadStepRecord
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.microbatch import RankBatch

_SHOWN_ROWS = 32


def examine(
    step: int,
    result: StepResult,
    batch: RankBatch,
    row_ids: Sequence[int],
    engine: Engine,
    mesh: ParallelMesh,
    last_good: RankBatch | None = None,
) -> BadStepRecord:
    """Compute the losses of a batch again, without dropout, to find the non-finite ones.

    All ranks must call it with their parts of the batch, and get the same record. A non-finite loss blames all rows of
    its microbatch.

    Args:
        result: The result of the step, which left weights and optimizer as they were.
        row_ids: The indices in the training split of the rows of the whole global batch.
        last_good: The batch of the step before, which was finite; if its loss is not finite now, the weights have
            diverged, and the rows are innocent.
    """
    bad: list[int] = []
    for microbatch in batch.microbatches:
        if not math.isfinite(engine.eval_step(microbatch).loss_sum):
            bad += [int(row_ids[place]) for place in microbatch.rows.tolist()]
    # The rows of the step before were finite with older weights; if they are not now, the weights are to blame.
    again = [engine.eval_step(microbatch).loss_sum for microbatch in (last_good.microbatches if last_good else ())]
    # All ranks call both collectives, with rows or without, and so get the same record.
    of_ranks = mesh.all_gather(bad)
    diverged = any(mesh.all_gather(int(not all(map(math.isfinite, again)))))
    return BadStepRecord(
        step=step,
        loss=result.loss,
        grad_norm=result.grad_norm,
        ranks=tuple(rank for rank, rows in enumerate(of_ranks) if rows),
        rows=tuple(sorted({row for rows in of_ranks for row in rows})),
        diverged=diverged,
    )


def remedy(record: BadStepRecord) -> str:
    """Return the remedy for the likely cause."""
    lower = "lower `optimizer.learning_rate`, or lengthen `schedule.warmup`"
    if record.diverged or not record.rows:
        return lower
    return f"look at the rows for extreme values, or {lower}"


def describe(record: BadStepRecord) -> str:
    """Return the sentence that the user reads."""
    if record.diverged:
        where = "the weights have diverged: the loss of the previous step's rows is no longer finite either"
    elif record.rows:
        ranks = f"rank{'s' if len(record.ranks) > 1 else ''} {', '.join(map(str, record.ranks))}"
        rows = listed(record.rows, _SHOWN_ROWS)
        where = f"it is not finite on {ranks}, among the rows {rows} of the training split (the first is 0)"
    elif math.isfinite(record.loss):
        where = "the loss of each row is finite, the gradient is not"
    else:
        where = "computed again, without dropout, the loss of each row is finite"
    return f"step {record.step}: the loss is {record.loss} and the gradient norm {record.grad_norm}; {where}"
