"""DataParallel: one process with a copy of the model on every GPU, for users of older articles.

DataParallel gathers the outputs on the first GPU, which therefore needs more memory. Here, each copy computes its own
loss, so only scalars are gathered.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn

from trainer.base.errors import UsageError
from trainer.engine.accumulation import AccumulationSchedule
from trainer.engine.forward import ModelForward, prepare_model, without_cache
from trainer.engine.native import NativeEngine
from trainer.models.place import PlacedModel
from trainer.parallel.dropout import DropoutKeys, MicrobatchKey
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.microbatch import Microbatch
from trainer.parallel.placement import whole
from trainer.recipe.plan import RunPlan
from trainer.tasks.task import Task


class LossReplica(nn.Module):
    """The module that is copied to every GPU: the model and its loss. Rows and their key are split along the batch."""

    def __init__(self, model: nn.Module, task: Task, keys: DropoutKeys | None) -> None:
        super().__init__()
        self.model = model
        self._task = task
        self._keys = keys
        self._constants = without_cache(model)

    def forward(self, step: int, rows: Tensor, labels: Tensor, **inputs: Tensor) -> Tensor:
        """Return the sum of losses of this copy's rows, `[1]`."""
        key = MicrobatchKey(step, rows, mask=inputs.get("attention_mask"))
        with self._keys.use(key) if self._keys else nullcontext():
            output = self.model(**self._task.model_inputs(inputs), **self._constants)
        # DataParallel concatenates outputs along dimension 0, which a scalar lacks.
        return self._task.loss_sum(self._task.scores(output, inputs, labels), labels).unsqueeze(0)


class ReplicatedForward(ModelForward):
    """The forward pass with each microbatch split over the GPUs; evaluations run on the first GPU."""

    def __init__(self, built: PlacedModel, task: Task, mesh: ParallelMesh, plan: RunPlan) -> None:
        super().__init__(built, task, mesh, plan)
        self._replicas = nn.DataParallel(LossReplica(built.model, task, built.dropout_keys))

    def loss_sum(self, microbatch: Microbatch) -> Tensor:
        microbatch = microbatch.to(self.mesh.device)
        with self._watch:
            # DataParallel splits tensors along the batch, and gives the number of the step to each copy.
            sums: Tensor = self._replicas(
                step=self._step, rows=microbatch.text_rows, labels=microbatch.labels, **microbatch.inputs
            )
        self._end_first_pass()
        return sums.sum()


def build_replicated(
    built: PlacedModel, task: Task, mesh: ParallelMesh, plan: RunPlan, total_steps: int
) -> NativeEngine:
    """Return the engine of `dp`.

    Raises:
        UsageError: there are fewer than two GPUs.
    """
    gpus = torch.cuda.device_count()
    if gpus < 2:
        raise UsageError(
            f"`parallel.strategy` is dp, which spreads one process over several GPUs, but this machine shows {gpus};"
            " use ddp, which runs on any number of processes"
        )
    built = prepare_model(built, mesh, plan)
    built.model.to(mesh.device)
    forward = ReplicatedForward(built, task, mesh, plan)
    schedule = AccumulationSchedule(forward.loss_sum, nullcontext)
    # One process holds every parameter whole.
    return NativeEngine(forward, [built], schedule, whole(built.model), total_steps)
