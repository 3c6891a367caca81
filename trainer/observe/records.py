"""What happened, as plain values: the only things that pass from the training loop to an observer.

Everything is global, over all ranks, unless its name says otherwise, so that any observer can stand on rank 0 alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trainer.parallel.state_bytes import StateBytes

Kind = Literal["split", "replicated", "frozen", "tied"]


@dataclass(frozen=True)
class ParameterGroup:
    """The parameters that lie in one way; a frozen one is in `frozen` only.

    Those of `tied`, which stand in several places of the model, are in another group as well.
    """

    placement: Kind
    num_tensors: int
    num_parameters: int  # of the whole model, a split parameter counted once
    bytes_per_rank: int  # on the rank that holds the most


@dataclass(frozen=True)
class MajorityClass:
    """The commonest class of the validation split: what a model that has learned nothing can say."""

    label: str
    share: float  # of the rows, 0 to 1: the accuracy of always saying it


@dataclass(frozen=True)
class RunInfo:
    """All that is known before the first step."""

    name: str
    folder: Path
    launcher: str
    device: str  # as the vendor calls it: "NVIDIA H100 80GB HBM3", or "cpu"
    world_size: int
    layout: str
    batch: str
    strategy: str
    precision: str
    parameters: tuple[ParameterGroup, ...]
    state_bytes: StateBytes  # by formula; activations and buffers come on top
    num_train_rows: int
    num_validation_rows: int | None  # None: the data has no validation split
    majority: MajorityClass | None  # None: not a classification
    steps_per_epoch: int
    total_steps: int
    versions: Mapping[str, str]  # package -> version
    recipe_hash: str
    recipe: Mapping[str, Any]  # resolved, as JSON values
    stages: tuple[str, ...] = ()  # of a pipeline: how it runs, and what each stage has
    resumed_from: int | None = None  # the last step that the loaded checkpoint holds


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step, made at every logging interval.

    `loss`, `grad_norm` and `learning_rate` are of this step; the seconds and rates are means over the steps since the
    record before, without the time of evaluations and checkpoints.
    """

    step: int  # the first step is 1
    epoch: float  # passes over the training split when the step ended
    loss: float  # mean over the global batch
    grad_norm: float  # before clipping
    learning_rate: float
    samples: int  # consumed since the start of the training, resumed parts included
    tokens: int | None = field(default=None, kw_only=True)  # likewise, without padding; None: rows have none
    step_seconds: float
    samples_per_second: float
    tokens_per_second: float | None = field(default=None, kw_only=True)
    peak_memory_bytes: int  # of the rank that used the most
    skipped_steps: int | None = None  # so far, for overflow; fp16 only
    loss_scale: float | None = None  # fp16 only
    mfu: float | None = None  # model FLOPs utilisation, 0 to 1; None: unknown peak


@dataclass(frozen=True)
class EvaluationRecord:
    """The metrics of the whole validation split after `step` steps."""

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class BadStepRecord:
    """A step that was not taken, because its loss or its gradient was not finite."""

    step: int
    loss: float
    grad_norm: float
    ranks: tuple[int, ...]  # whose rows gave a loss that is not finite; none: the gradient alone is not
    rows: tuple[int, ...]  # among which they are: places in the training split, from 0


@dataclass(frozen=True)
class BestMetric:
    """The evaluation that `evaluation.best` prefers so far."""

    name: str
    value: float
    step: int


@dataclass(frozen=True)
class Idling:
    """How long pipeline ranks had nothing to do, as shares of their steps."""

    measured: tuple[float, ...]  # of each rank of the pipeline axis, the mean over its replicas
    bubble: float  # by formula, if all stages cost the same


@dataclass(frozen=True)
class EndRecord:
    """How the run ended, good or bad, and how to go on."""

    outcome: Literal["finished", "stopped", "failed"]
    exit_code: int
    folder: Path
    model_folder: Path | None  # None: no model was exported
    best: BestMetric | None  # None: nothing was evaluated
    step: int  # the last step done
    seconds: float  # of this process, from start to end
    resume_command: str  # exact, to paste into a shell
    message: str | None = None  # why, where the outcome alone does not say it
    pipeline: Idling | None = None  # None: there are no stages, or nothing was trained
