"""The compared trainings: the same model and recipe in several loops, and all but one on the same batches."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import (
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainingArguments,
)

from tests.benchmarks.peers import PEERS, PeerTraining
from tests.benchmarks.setting import Setting
from trainer.checkpoint.saving import Saved, Saver
from trainer.engine.builders import build_engine
from trainer.observe.builders import build_observers
from trainer.observe.meter import Meter
from trainer.observe.observer import Observers
from trainer.parallel.microbatch import RankBatch
from trainer.ranks.environment import LaunchEnvironment
from trainer.ranks.stopping import StopRequest
from trainer.training.best_evaluation import BestEvaluation
from trainer.training.loop import Loop
from trainer.training.run_info import model_size, run_info, total_peak_flops


def peer(name: str, setting: Setting, batches: Iterable[RankBatch]) -> None:
    """Train with the loop of another tool, which logs nothing here."""
    PEERS[name](_of(setting), batches, None)


def trainer_by_default(setting: Setting, steps: Iterable[object]) -> None:
    """Train a classifier with transformers' Trainer as its pages show, for one step of each item of `steps`.

    Sampler, padding, loader, loss and optimizer are its own; sizes of batches, learning rate and precision are those of
    the recipe.
    """
    recipe, batch, pace = setting.recipe, setting.plan.batch, iter(steps)
    tokenizer = AutoTokenizer.from_pretrained(recipe.model.tokenizer)
    lines = Path(recipe.data.train).read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines[: setting.batches_per_epoch * batch.global_batch_size]]
    classes = sorted({row["label"] for row in rows})

    class Pace(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
            control.should_training_stop = next(pace, None) is None

    with tempfile.TemporaryDirectory() as folder:
        Trainer(
            setting.model().model,
            TrainingArguments(
                output_dir=folder,
                max_steps=setting.total_steps + 1,
                per_device_train_batch_size=batch.micro_batch_size,
                gradient_accumulation_steps=batch.num_microbatches,
                learning_rate=recipe.optimizer.learning_rate,
                bf16=recipe.precision == "bf16",
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
                ddp_backend="gloo",
            ),
            train_dataset=[
                {
                    **tokenizer(row["text"], truncation=True, max_length=recipe.data.max_length),
                    "labels": classes.index(row["label"]),
                }
                for row in rows
            ],
            data_collator=DataCollatorWithPadding(tokenizer),
            callbacks=[Pace()],
        ).train()


def _of(setting: Setting) -> PeerTraining:
    steps = setting.total_steps
    return PeerTraining(setting.recipe, setting.plan, setting.task, setting.model(), steps, steps)


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


def ours(setting: Setting, batches: Iterable[RankBatch]) -> None:
    """Train with the loop and engine of `trainer`, and with the observers of a default run on rank 0."""
    recipe, mesh, task = setting.recipe, setting.mesh, setting.task
    built = setting.model()
    engine = build_engine([built], task, mesh, setting.plan, setting.total_steps)
    info = run_info(
        setting.plan,
        LaunchEnvironment("none"),
        replace(setting.data, validation=None),
        [built.model],
        engine.placements,
        mesh,
    )
    with open(os.devnull, "w", encoding="utf-8") as console:
        observers = build_observers(recipe.logging, console) if mesh.rank == 0 else Observers()
        observers.start(info)
        saver = Saver((), engine, mesh, Saved({}))  # the other contestants do not save
        meter = Meter(model_size([built.model], engine.placements, mesh), total_peak_flops(recipe, mesh))
        Loop(
            recipe=recipe,
            engine=engine,
            loader=_Counted(batches, setting.total_steps),
            validation=BestEvaluation(recipe, saver.progress, None, lambda: None),
            mesh=mesh,
            observers=observers,
            meter=meter,
            steps_per_epoch=info.steps_per_epoch,
            saver=saver,
            stop=StopRequest(),
        ).run()
        observers.close()
