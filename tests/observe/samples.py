"""Records of a small imaginary run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.observe.records import BestMetric, EndRecord, MajorityClass, ParameterGroup, RunInfo, StepRecord
from trainer.parallel.state_bytes import StateBytes


def run_info(folder: Path, **changes: Any) -> RunInfo:
    run = RunInfo(
        name="small",
        folder=folder,
        launcher="trainer",
        device="cpu",
        world_size=2,
        layout="dp_replicate 2",
        batch="32 rows a step = 2 ranks x 2 microbatches of at most 8",
        strategy="ddp",
        precision="fp32",
        parameters=(
            ParameterGroup("split", 12, 1_234_567, 1 << 20),
            ParameterGroup("replicated", 201, 109_483_778, 437_935_112),
            ParameterGroup("frozen", 0, 0, 0),
        ),
        state_bytes=StateBytes(438_983_688, 438_983_688, 877_967_376),
        num_train_rows=3668,
        num_validation_rows=408,
        majority=MajorityClass("equivalent", 0.6838),
        steps_per_epoch=115,
        total_steps=345,
        versions={"torch": "2.13.0"},
        recipe_hash="0123456789abcdef",
        recipe={"name": "small", "training": {"epochs": 3}},
    )
    return replace(run, **changes)


def step_record(step: int, **changes: Any) -> StepRecord:
    record = StepRecord(
        step=step,
        epoch=step / 115,
        loss=0.7 - step / 1000,
        grad_norm=12.345,
        learning_rate=5e-5,
        samples=32 * step,
        tokens=3000 * step,
        step_seconds=0.1,
        samples_per_second=320.4,
        tokens_per_second=33123.4,
        peak_memory_bytes=2 << 30,
    )
    return replace(record, **changes)


def end_record(folder: Path, **changes: Any) -> EndRecord:
    record = EndRecord(
        outcome="finished",
        exit_code=0,
        folder=folder,
        model_folder=folder / "model",
        best=BestMetric("accuracy", 0.8125, 230),
        step=345,
        seconds=123.4,
        resume_command="trainer run small.json --processes 2",
    )
    return replace(record, **changes)
