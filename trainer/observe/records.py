"""Records that the training loop passes to observers; values cover all ranks unless stated otherwise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from trainer.observe.preview_records import Preview
from trainer.parallel.state_bytes import StateBytes

Kind = Literal["split", "replicated", "frozen", "tied"]

ROWS, STEP, DEVICE, EVALUATION, CHECKPOINT, COMPILATION, OUTPUT, SAMPLING = (
    "rows", "step", "device", "evaluation", "checkpoint", "compilation", "output", "sampling",
)  # fmt: skip
"""The parts of the wall time of a loop: waiting for rows; taking steps on the host; waiting for the device; evaluating;
saving; compiling; writing logs; and sampling steps."""

START, RESTARTS, END = "start", "restarts", "end"
"""The parts outside of the loop: until the first step, later starts with the steps that they repeat, and after it."""


@dataclass(frozen=True)
class ParameterGroup:
    """The parameters with one kind of placement; frozen parameters are in `frozen` only.

    `tied` parameters have several names in the model; they are also in another group.
    """

    placement: Kind
    num_tensors: int
    num_parameters: int  # of the whole model, a split parameter counted once
    bytes_per_rank: int  # on the rank that holds the most


@dataclass(frozen=True)
class MajorityClass:
    """The most frequent class of the validation split, the baseline of accuracy."""

    label: str
    share: float  # of the rows, 0 to 1: the accuracy of a constant prediction


@dataclass(frozen=True)
class RunInfo:
    """The facts of a run before its first step."""

    name: str
    folder: Path
    launcher: str
    device: str  # the vendor's name: "NVIDIA H100 80GB HBM3", or "cpu"
    world_size: int
    layout: str
    batch: str
    strategy: str
    precision: str
    parameters: tuple[ParameterGroup, ...]
    state_bytes: StateBytes  # by formula, without activations and buffers
    num_train_rows: int
    num_validation_rows: int | None  # None: the data has no validation split
    majority: MajorityClass | None  # None: not a classification
    steps_per_epoch: int
    total_steps: int
    versions: Mapping[str, str]  # package -> version
    recipe_hash: str
    recipe: Mapping[str, Any]  # resolved, as JSON values
    stages: tuple[str, ...] = ()  # of a pipeline: lines on its schedule and on each stage
    baselines: Mapping[str, float] = field(default_factory=dict)  # metrics of predictions that ignore the input
    classes: tuple[tuple[str, int], ...] = ()  # name and training rows of each; empty if rows have no single class
    positive: str | None = None  # the class that `f1` counts as positive
    resumed_from: int | None = None  # the last step that the loaded checkpoint holds
    unit: str = "rows"  # of the numbers of rows: "rows", or "windows" or "packed rows" of them
    started: float | None = None  # seconds since 1970
    start_seconds: float = 0.0  # until the first step
    lost_seconds: float = 0.0  # of the steps of earlier starts that this one repeats
    groups: tuple[tuple[str, ...], ...] = ()  # the header and the rows of a table of parameter groups; empty without
    preview: Preview | None = None  # of the first step; None: the run is resumed
    ranks: tuple[tuple[str, ...], ...] = ()  # the header and the rows of a table of the layout; empty for one process


@dataclass(frozen=True)
class SampledStep:
    """The mean seconds of sampled steps on the ranks that wait for the slowest one; without others, on the only rank.

    The slowest rank waits least in collectives, so its time in them is that of communication.
    """

    computing: float
    host: float  # nothing is computed or communicated
    communication: float  # nothing is computed meanwhile
    waiting: float  # for the slowest rank
    slowest: int


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step, made at every logging interval.

    `loss`, `grad_norm` and `learning_rate` are values of this step. Seconds and rates are means over the steps since
    the last record, without the time of evaluations and checkpoints.
    """

    step: int  # the first step is 1
    epoch: float  # passes over the training split when the step ended
    loss: float  # mean over the global batch
    grad_norm: float  # before clipping
    learning_rate: float
    samples: int  # consumed since the start of the training, resumed parts included
    tokens: int | None = field(default=None, kw_only=True)  # consumed, without padding; None: rows have none
    step_seconds: float
    samples_per_second: float
    tokens_per_second: float | None = field(default=None, kw_only=True)
    peak_memory_bytes: int  # of the rank that used the most
    rank_memory_bytes: tuple[int, ...] = field(default=(), kw_only=True)  # the peak of each; `dp`: of each GPU
    skipped_steps: int | None = None  # so far, for overflow; fp16 only
    loss_scale: float | None = None  # fp16 only
    mfu: float | None = None  # model FLOPs utilisation, 0 to 1; None: unknown peak
    padding: float | None = None  # share of the positions of texts since the last record; None: rows have none
    seconds: Mapping[str, float] = field(default_factory=dict)  # since the last record, by the parts of the wall time
    sample: SampledStep | None = None  # None: no step was sampled since the last record
    more: Mapping[str, float] = field(default_factory=dict)  # of this step, by names of parts of the model

    def numbers(self) -> dict[str, Any]:
        """Return the values that are single numbers or None."""
        values = asdict(self)
        for name in ("rank_memory_bytes", "seconds", "sample"):
            del values[name]
        return {**values.pop("more"), **values}


@dataclass(frozen=True)
class EvaluationRecord:
    """The metrics of the whole validation split after `step` steps.

    `picture` is the task's own view of the predictions, as JSON values: see `Task.picture`.
    """

    step: int
    metrics: Mapping[str, float]
    picture: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class CheckpointRecord:
    """A complete checkpoint in the run's folder."""

    step: int
    folder: Path


@dataclass(frozen=True)
class LoggedRecord:
    """The numbers that callbacks have logged after `step` steps, by their names."""

    step: int
    numbers: Mapping[str, float]


@dataclass(frozen=True)
class BadStepRecord:
    """A step that was not taken because of a non-finite loss or gradient."""

    step: int
    loss: float
    grad_norm: float
    ranks: tuple[int, ...]  # with rows of non-finite loss; empty if only the gradient is non-finite
    rows: tuple[int, ...]  # candidates: indices in the training split, from 0
    diverged: bool = False  # the loss of the last good batch is no longer finite either: the weights are the cause


@dataclass(frozen=True)
class BestMetric:
    """The evaluation that `evaluation.best` prefers so far, and its loss, which decides between equal values."""

    name: str
    value: float
    step: int
    loss: float = math.inf  # not known


@dataclass(frozen=True)
class Idling:
    """The idle time of pipeline ranks, as shares of their steps."""

    measured: tuple[float, ...]  # of each rank of the pipeline axis, the mean over its replicas
    bubble: float  # by formula, if all stages cost the same


@dataclass(frozen=True)
class Compilation:
    """The work of torch.compile on rank 0."""

    graphs: int
    graph_breaks: int
    seconds: float


@dataclass(frozen=True)
class SummaryRow:
    """A row of the summary of a run, and the lines below it."""

    label: str
    text: str
    lines: Sequence[str] = ()


@dataclass(frozen=True)
class EndRecord:
    """The outcome of a run, and the command that resumes or restarts it."""

    outcome: Literal["finished", "stopped", "failed"]
    exit_code: int
    folder: Path
    model_folder: Path | None  # None: no model was exported
    best: BestMetric | None  # None: nothing was evaluated
    step: int  # the last step done
    seconds: float  # of this process, from start to end
    resume_command: str  # exact, to paste into a shell
    message: str | None = None  # the reason, if the outcome needs one
    pipeline: Idling | None = None  # None: there are no stages, or nothing was trained
    compilation: Compilation | None = None  # None: nothing was compiled
    warnings: tuple[str, ...] = ()  # on a training that has taught the model nothing
    has_checkpoint: bool = True  # else the command starts from the first step
    rows: tuple[SummaryRow, ...] = ()  # of observers
    parts: Mapping[str, float] = field(default_factory=dict)  # seconds since the last step record
