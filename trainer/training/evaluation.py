"""Metrics over a whole split: each row counts once at every world size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.data.loader import EvalLoader
from trainer.engine.engine import Engine
from trainer.observe.observer import Observer
from trainer.parallel.mesh import ParallelMesh
from trainer.tasks.task import Task


class Evaluator:
    """Evaluates the engine's model on one split.

    Args:
        engine: The engine that holds the model.
        loader: This rank's part of the split.
        num_rows: The number of rows of the split over all ranks.
        task: The task that computes the metrics.
        mesh: The mesh of all ranks.
        observers: The observers that show the progress.
    """

    def __init__(
        self, engine: Engine, loader: EvalLoader, num_rows: int, task: Task, mesh: ParallelMesh, observers: Observer
    ) -> None:
        self._engine = engine
        self._loader = loader
        self._num_rows = num_rows
        self._task = task
        self._mesh = mesh
        self._observers = observers

    def evaluate(self) -> dict[str, float]:
        """Return the task's metrics and the mean `loss`, the same on every rank. All ranks must call it."""
        loss_sum, num_valid = 0.0, 0
        parts: dict[str, list[Tensor]] = defaultdict(list)
        for done, microbatch in enumerate(self._loader, start=1):
            result = self._engine.eval_step(microbatch)
            loss_sum += result.loss_sum
            num_valid += result.num_valid
            for name, tensor in result.predictions.items():
                parts[name].append(tensor)
            self._observers.evaluation_progress(done, len(self._loader))
        here = {name: torch.cat(tensors) for name, tensors in parts.items()}
        # Ranks that share a model replica have the same rows, so one of them counts.
        gathered = self._mesh.gather((loss_sum, num_valid, here) if self._mesh.index("tp") == 0 else (0.0, 0, {}))
        metrics: dict[str, float] = self._mesh.share(self._combine(gathered) if gathered else None)
        return metrics

    def _combine(self, gathered: list[tuple[float, int, Mapping[str, Tensor]]]) -> dict[str, float]:
        parts: dict[str, list[Tensor]] = defaultdict(list)
        for _, _, predictions in gathered:
            for name, tensor in predictions.items():
                parts[name].append(tensor)
        whole = {name: torch.cat(tensors) for name, tensors in parts.items()}
        assert all(len(tensor) == self._num_rows for tensor in whole.values()), "every row is evaluated exactly once"
        loss_sum, num_valid = sum(part[0] for part in gathered), sum(part[1] for part in gathered)
        return {"loss": loss_sum / max(1, num_valid), **self._task.metrics(whole)}
