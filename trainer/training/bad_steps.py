"""Steps whose loss or gradient is not finite: which rows of the training split gave it, and on which ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trainer.engine.engine import Engine, StepResult
from trainer.observe.records import BadStepRecord
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.microbatch import RankBatch

_SHOWN_ROWS = 32


def examine(
    step: int, result: StepResult, batch: RankBatch, row_ids: Sequence[int], engine: Engine, mesh: ParallelMesh
) -> BadStepRecord:
    """Computes the losses of a batch again, without dropout, to find those that are not finite.

    All ranks must call it, with their parts of the batch; all get the same record. Rows that went through the model
    together are told together.

    Args:
        step: number of the step, from 1.
        result: of the step; weights and optimizer are as before it.
        batch: of the step.
        row_ids: places in the training split of the rows of the whole global batch.
        engine: holds the model.
        mesh: the ranks.
    """
    bad: list[int] = []
    for microbatch in batch.microbatches:
        if not math.isfinite(engine.eval_step(microbatch).loss_sum):
            bad += [int(row_ids[place]) for place in microbatch.rows.tolist()]
    found = mesh.share(mesh.gather(bad))
    return BadStepRecord(
        step=step,
        loss=result.loss,
        grad_norm=result.grad_norm,
        ranks=tuple(rank for rank, rows in enumerate(found) if rows),
        rows=tuple(sorted({row for rows in found for row in rows})),
    )


def describe(record: BadStepRecord) -> str:
    """What happened in the step, as the user reads it."""
    if record.rows:
        shown = ", ".join(map(str, record.rows[:_SHOWN_ROWS]))
        more = f" and {len(record.rows) - _SHOWN_ROWS} more" if len(record.rows) > _SHOWN_ROWS else ""
        ranks = f"rank{'s' if len(record.ranks) > 1 else ''} {', '.join(map(str, record.ranks))}"
        where = f"it is not finite on {ranks}, among the rows {shown}{more} of the training split (the first is 0)"
    elif math.isfinite(record.loss):
        where = "the loss of each row is finite, the gradient is not"
    else:
        where = "computed again, without dropout, the loss of each row is finite"
    return f"step {record.step}: the loss is {record.loss} and the gradient norm {record.grad_norm}; {where}"
