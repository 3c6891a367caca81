"""Results and metrics over a whole split: each row counts once at every world size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from trainer.data.loader import EvalLoader
from trainer.engine.engine import Engine
from trainer.observe.observer import Observer
from trainer.parallel.copying import one_behind
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.microbatch import IGNORED_LABEL, Microbatch
from trainer.parallel.placement import ROWS_AXIS
from trainer.tasks.task import Task
from trainer.tasks.types import EvaluatedSplit

Result = TypeVar("Result")

_ROWS = "_rows"
"""The name of the row ids among the tensors of rows."""


class Evaluated(NamedTuple):
    """The result of an evaluation.

    `metrics` are those of the task and the mean `loss`, the same on every rank. `picture` is the task's own view of the
    predictions, on rank 0.
    """

    metrics: dict[str, float]
    picture: dict[str, Any] | None


@dataclass(frozen=True)
class Evaluator:
    """Evaluates the engine's model on one split."""

    engine: Engine
    loader: EvalLoader
    num_rows: int
    task: Task
    mesh: ParallelMesh
    observers: Observer
    split: EvaluatedSplit | None = None

    def evaluate(self) -> Evaluated:
        """Evaluate the split. All ranks must call it."""
        # On the host: Python's floats are fp64, and the sum does not depend on the device.
        loss_sum, num_valid = 0.0, 0
        here = RowTensors()
        for done, (rows, result) in enumerate(_results(self.loader, self.engine.begin_eval), start=1):
            loss_sum += result.loss_sum
            num_valid += result.num_valid
            here.add(rows, result.predictions)
            # Progress is not reported to other ranks, so it is no collective.
            self.observers.evaluation_progress(done, len(self.loader))
        # Ranks that share a model replica have the same rows, so one of them counts.
        of_rank = (loss_sum, num_valid, here.joined()) if self.mesh.index(ROWS_AXIS) == 0 else (0.0, 0, {})
        gathered = self.mesh.gather(of_rank)
        combined = self._combine(gathered) if gathered else None
        # Rank 0 computes the metrics, and all ranks decide by the same numbers.
        metrics: dict[str, float] = self.mesh.share(combined and combined.metrics)
        return Evaluated(metrics, combined and combined.picture)

    def _combine(self, gathered: list[tuple[float, int, Mapping[str, Tensor]]]) -> Evaluated:
        whole = in_row_order([predictions for _, _, predictions in gathered], self.num_rows)
        loss_sum, num_valid = sum(part[0] for part in gathered), sum(part[1] for part in gathered)
        metrics = self.task.metrics(whole) if self.split is None else self.task.split_metrics(whole, self.split)
        # A mean over the labels of all ranks, and no mean of means.
        return Evaluated({"loss": loss_sum / max(1, num_valid), **metrics}, self.task.picture(whole, self.split))


def gathered_rows(
    loader: Iterable[Microbatch],
    begin: Callable[[Microbatch], Callable[[], Mapping[str, Tensor]]],
    mesh: ParallelMesh,
    num_rows: int,
) -> dict[str, Tensor] | None:
    """Return the tensors of all rows of a split in their order on rank 0, None elsewhere. All ranks must call it.

    `begin` begins the work for a microbatch, and returns a function that waits for its tensors.
    """
    here = RowTensors()
    for rows, tensors in _results(loader, begin):
        here.add(rows, tensors)
    # Ranks that share a model replica have the same rows, so one of them counts.
    gathered = mesh.gather(here.joined() if mesh.index(ROWS_AXIS) == 0 else {})
    return None if gathered is None else in_row_order(gathered, num_rows)


def _results(
    loader: Iterable[Microbatch], begin: Callable[[Microbatch], Callable[[], Result]]
) -> Iterator[tuple[Tensor, Result]]:
    """Yield row ids and result of each microbatch; the next one is begun before a result is read."""

    def begun(microbatch: Microbatch) -> Callable[[], tuple[Tensor, Result]]:
        read = begin(microbatch)
        return lambda: (microbatch.rows, read())

    # The device works on the next microbatch while the host reads this one.
    return one_behind(map(begun, loader))


class RowTensors:
    """The tensors of this rank's rows of a split, collected batch by batch."""

    def __init__(self) -> None:
        self._parts: dict[str, list[Tensor]] = defaultdict(list)

    def add(self, rows: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Add the tensors `[batch, ...]` of the rows with the ids `rows` `[batch]`; nothing if there are none."""
        if tensors:
            self._parts[_ROWS].append(rows.cpu())
        for name, tensor in tensors.items():
            self._parts[name].append(tensor)

    def joined(self) -> dict[str, Tensor]:
        """Return the tensors and the row ids, each `[rows, ...]`."""
        return {name: cat_padded(tensors) for name, tensors in self._parts.items()}


def cat_padded(tensors: Sequence[Tensor]) -> Tensor:
    """Join tensors `[batch, ...]` of batches along the rows; pad the second dimension with `IGNORED_LABEL`."""
    if len({tensor.shape[1:] for tensor in tensors}) > 1:
        width = max(tensor.shape[1] for tensor in tensors)
        tensors = [
            torch.nn.functional.pad(
                tensor, (0, 0) * (tensor.dim() - 2) + (0, width - tensor.shape[1]), value=IGNORED_LABEL
            )
            for tensor in tensors
        ]
    return torch.cat(tuple(tensors))


def in_row_order(gathered: Sequence[Mapping[str, Tensor]], num_rows: int) -> dict[str, Tensor]:
    """Return the tensors of a whole split, without row ids, in the order of its rows.

    Args:
        gathered: The result of `RowTensors.joined` of each rank; empty for a rank that does not count.
    """
    names = dict.fromkeys(name for part in gathered for name in part)
    whole = {name: cat_padded([part[name] for part in gathered if name in part]) for name in names}
    # Fillers have no tensors, so a row that is missing or doubled shows here.
    assert all(len(tensor) == num_rows for tensor in whole.values()), "every row is evaluated exactly once"
    order = whole[_ROWS].argsort() if whole else None
    return {name: tensor[order] for name, tensor in whole.items() if name != _ROWS}
