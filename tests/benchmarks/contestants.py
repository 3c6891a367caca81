"""The compared trainings. Each uses the same model, recipe and batches with its own loop."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from transformers import get_linear_schedule_with_warmup

from tests.benchmarks.setting import Setting
from trainer.checkpoint.progress import Progress
from trainer.engine.building import build_engine
from trainer.observe.build import build_observers
from trainer.observe.meter import Meter
from trainer.observe.observer import Observers
from trainer.parallel.microbatch import RankBatch
from trainer.ranks.environment import LaunchEnvironment
from trainer.ranks.stopping import StopRequest
from trainer.training.loop import Loop
from trainer.training.run_info import model_size, run_info, total_peak_flops


def hand_written(setting: Setting, batches: Iterable[RankBatch]) -> None:
    """Train with the shortest PyTorch loop for the same step, without logging, checks or signals."""
    recipe, ranks = setting.recipe, setting.mesh.world_size
    model = setting.model().model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.optimizer.learning_rate, fused=True)
    schedule = get_linear_schedule_with_warmup(optimizer, setting.warmup_steps, setting.total_steps)
    ddp = model
    if ranks > 1:
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, forward_sync_buffers=False)
    for batch in batches:
        for microbatch in batch.microbatches:
            if ranks > 1:
                ddp.require_backward_grad_sync = microbatch is batch.microbatches[-1]
            loss = F.cross_entropy(ddp(**microbatch.inputs).logits, microbatch.labels, reduction="sum")
            (loss * ranks / batch.num_rows).backward()  # DDP averages over the ranks
        clip_grad_norm_(model.parameters(), recipe.training.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def hugging_face(setting: Setting, batches: Iterable[RankBatch]) -> None:
    """Train with transformers' Trainer. It neither evaluates nor saves, and logs as often as `ours`."""
    from transformers import PrinterCallback, Trainer, TrainingArguments

    class OnOurBatches(Trainer):
        def get_train_dataloader(self) -> Any:
            return _Flat(batches)

    recipe = setting.recipe
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=setting.total_steps,
            per_device_train_batch_size=setting.plan.batch.micro_batch_size,
            gradient_accumulation_steps=setting.plan.batch.num_microbatches,
            learning_rate=recipe.optimizer.learning_rate,
            weight_decay=recipe.optimizer.weight_decay,
            max_grad_norm=recipe.training.max_grad_norm,
            lr_scheduler_type="linear",
            warmup_steps=setting.warmup_steps,
            optim="adamw_torch_fused",
            logging_steps=recipe.logging.every.count,
            save_strategy="no",
            eval_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            ddp_backend="gloo",
            ddp_find_unused_parameters=False,
            ddp_broadcast_buffers=False,
        )
        trainer = OnOurBatches(setting.model().model, arguments)
        trainer.remove_callback(PrinterCallback)
        trainer.train()


class _Flat:
    """The microbatches of rank batches as dictionaries for transformers' Trainer, without a length."""

    def __init__(self, batches: Iterable[RankBatch]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for batch in self._batches:
            for microbatch in batch.microbatches:
                yield {**microbatch.inputs, "labels": microbatch.labels}


class _Counted:
    """Batches with the length that the loop asks for."""

    def __init__(self, batches: Iterable[RankBatch], number: int) -> None:
        self._batches, self._number = batches, number

    def __len__(self) -> int:
        return self._number

    def __iter__(self) -> Iterator[RankBatch]:
        return iter(self._batches)

    def row_ids(self, step: int) -> tuple[int, ...]:
        return ()


class _SavesNothing:
    """A saver that saves nothing, because the other contestants do not save."""

    def __init__(self) -> None:
        self.progress = Progress()

    def save(self) -> None:
        pass

    def begin_poll(self) -> Callable[[], None]:
        return lambda: None

    def finish(self) -> None:
        pass


def ours(setting: Setting, batches: Iterable[RankBatch]) -> None:
    """Train with the loop and engine of `trainer`, and with the observers of a default run on rank 0."""
    recipe, mesh, task = setting.recipe, setting.mesh, setting.task
    built = setting.model()
    engine = build_engine([built], task, mesh, setting.plan, setting.total_steps)
    info = run_info(
        setting.plan, LaunchEnvironment("none"), task, setting.train, None, [built.model], engine.placements, mesh, None
    )
    with open(os.devnull, "w", encoding="utf-8") as console:
        observers = build_observers(recipe.logging, console) if mesh.rank == 0 else Observers()
        observers.start(info)
        Loop(
            recipe=recipe,
            engine=engine,
            loader=_Counted(batches, setting.total_steps),
            evaluator=None,
            mesh=mesh,
            observers=observers,
            meter=Meter(model_size([built.model], engine.placements, mesh), total_peak_flops(recipe, mesh)),
            steps_per_epoch=info.steps_per_epoch,
            saver=_SavesNothing(),
            keep_best=lambda: None,
            stop=StopRequest(),
        ).run()
        observers.close()
