"""Metrics over a whole split: each row counts once at every world size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from trainer.data.loader import EvalLoader
from trainer.engine.engine import Engine
from trainer.observe.observer import Observer
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.microbatch import IGNORED_LABEL
from trainer.tasks.task import Task
from trainer.tasks.types import EvaluatedSplit

ROWS = "_rows"
"""The name of the row ids among predictions."""


class Evaluator:
    """Evaluates the engine's model on one split.

    Args:
        engine: The engine that holds the model.
        loader: This rank's part of the split.
        num_rows: The number of rows of the split over all ranks.
        task: The task that computes the metrics.
        mesh: The mesh of all ranks.
        observers: The observers that show the progress.
        split: The split, for tasks with metrics that need its texts.
    """

    def __init__(
        self,
        engine: Engine,
        loader: EvalLoader,
        num_rows: int,
        task: Task,
        mesh: ParallelMesh,
        observers: Observer,
        split: EvaluatedSplit | None = None,
    ) -> None:
        self._engine = engine
        self._loader = loader
        self._num_rows = num_rows
        self._task = task
        self._mesh = mesh
        self._observers = observers
        self._split = split

    def evaluate(self) -> dict[str, float]:
        """Return the task's metrics and the mean `loss`, the same on every rank. All ranks must call it."""
        loss_sum, num_valid = 0.0, 0
        parts: dict[str, list[Tensor]] = defaultdict(list)
        for done, microbatch in enumerate(self._loader, start=1):
            result = self._engine.eval_step(microbatch)
            loss_sum += result.loss_sum
            num_valid += result.num_valid
            if result.predictions:
                parts[ROWS].append(microbatch.rows.cpu())
            for name, tensor in result.predictions.items():
                parts[name].append(tensor)
            self._observers.evaluation_progress(done, len(self._loader))
        here = {name: cat_padded(tensors) for name, tensors in parts.items()}
        # Ranks that share a model replica have the same rows, so one of them counts.
        gathered = self._mesh.gather((loss_sum, num_valid, here) if self._mesh.index("tp") == 0 else (0.0, 0, {}))
        metrics: dict[str, float] = self._mesh.share(self._combine(gathered) if gathered else None)
        return metrics

    def _combine(self, gathered: list[tuple[float, int, Mapping[str, Tensor]]]) -> dict[str, float]:
        parts: dict[str, list[Tensor]] = defaultdict(list)
        for _, _, predictions in gathered:
            for name, tensor in predictions.items():
                parts[name].append(tensor)
        whole = in_row_order({name: cat_padded(tensors) for name, tensors in parts.items()}, self._num_rows)
        loss_sum, num_valid = sum(part[0] for part in gathered), sum(part[1] for part in gathered)
        metrics = self._task.metrics(whole) if self._split is None else self._task.split_metrics(whole, self._split)
        return {"loss": loss_sum / max(1, num_valid), **metrics}


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


def in_row_order(parts: Mapping[str, Tensor], num_rows: int) -> dict[str, Tensor]:
    """Return `parts`, without their row ids, in the order of the rows.

    Args:
        parts: Tensors of all ranks, each `[rows, ...]`, and the index of each row in its split.
        num_rows: The number of rows of the split.
    """
    assert all(len(tensor) == num_rows for tensor in parts.values()), "every row is evaluated exactly once"
    order = parts[ROWS].argsort() if parts else None
    return {name: tensor[order] for name, tensor in parts.items() if name != ROWS}
