"""The measured speed of a step beside its plan, and the likely cause if it is much lower."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainer.base.text import size
from trainer.observe.records import CHECKPOINT, COMPILATION, DEVICE, EVALUATION, ROWS, SAMPLING, STEP, StepRecord
from trainer.recipe.schema import Recipe

LEAST_SHARE = 0.6
"""The share of the planned speed below which a step is noted."""

FIRST_STEP = 20
"""The step of a start from which its times count: earlier ones compile kernels and fill caches."""

PLANNED_FILE = "planned.json"
"""The file of a run's folder with the planned step, which `trainer report` shows beside the measured one."""

_LATE_HOST = 0.9  # the share of a step that the host takes if the device waits for it
_LEAST_CAUSE = 0.1  # the share of a step that a cause takes at least
_WORKERS = 2  # without any, or twice those that there are


@dataclass(frozen=True)
class Planned:
    """The planned seconds of a step on rows of the measured mean length, without padding.

    `rounded` are those in bf16; None if the recipe computes in 16 bits, or the device does not.
    """

    device: str
    length: int
    seconds: float
    rounded: float | None = None

    @property
    def fastest(self) -> float:
        return self.seconds if self.rounded is None else min(self.seconds, self.rounded)


@dataclass(frozen=True)
class PlannedRun:
    """The planned and the measured step of a run."""

    device: str
    ranks: int
    length: int | None  # the mean tokens of a text, for which the step was planned
    planned_seconds: float
    measured_seconds: float
    planned_bytes: int
    measured_bytes: int

    @property
    def factor(self) -> float:
        return self.measured_seconds / self.planned_seconds

    def rows(self) -> Iterator[tuple[str, str, str, str]]:
        """Yield the cells of a table."""
        yield "", "planned", "measured", "ratio"
        planned, measured = (f"{1000 * one:,.1f} ms" for one in (self.planned_seconds, self.measured_seconds))
        yield "time of a step", planned, measured, f"{self.factor:.2f}"
        held = f"{self.measured_bytes / self.planned_bytes:.2f}"
        yield "peak memory", size(self.planned_bytes), size(self.measured_bytes), held


def mean_length(record: StepRecord, recipe: Recipe) -> int | None:
    """Return the mean tokens of a text without padding, as `trainer plan --length`; None if rows have no tokens."""
    if not record.tokens_per_second or not record.samples_per_second:
        return None
    texts = recipe.task.texts_per_row or 1
    length = max(1, round(record.tokens_per_second / record.samples_per_second / texts))
    # Rows may have more texts than the recipe knows.
    return min(length, getattr(recipe.data, "max_length", length))


def shortfall(record: StepRecord, recipe: Recipe, planned: Planned, is_alone: bool) -> str | None:
    """Return a note on a step that is much slower than its plan, with the likely cause and its key; None if it is not.

    Args:
        is_alone: whether one rank trains; the host's time of several ranks has waits for each other.
    """
    share = planned.fastest / record.step_seconds
    if share >= LEAST_SHARE:
        return None
    lost, text = max(_causes(record, recipe, planned, is_alone), default=(0.0, ""))
    if lost < _LEAST_CAUSE * record.step_seconds:
        text = "its cause is not known; `trainer why` shows where the time goes"
    return (
        f"a step takes {record.step_seconds:.3g} s, and {planned.fastest:.3g} s in the plan of {planned.device}"
        f" ({share:.0%} of the planned speed): {text}"
    )


def _causes(record: StepRecord, recipe: Recipe, planned: Planned, is_alone: bool) -> Iterator[tuple[float, str]]:
    """Yield the seconds of a step that each cause takes, and its text."""
    pauses = (EVALUATION, CHECKPOINT, SAMPLING)
    seconds = {part: time for part, time in record.seconds.items() if part not in pauses}
    of_step = record.step_seconds / (sum(seconds.values()) or 1.0)
    rows = of_step * seconds.get(ROWS, 0.0)
    workers = 2 * recipe.data.num_workers or _WORKERS
    yield rows, f"{rows / record.step_seconds:.0%} of it waits for rows; set `data.num_workers={workers}`"
    compiled = of_step * seconds.get(COMPILATION, 0.0)
    yield compiled, f"{compiled / record.step_seconds:.0%} of it compiles; a larger `data.pad_to` makes fewer widths"
    computing = record.step_seconds - rows - compiled
    if record.padding and not recipe.data.padding_free:
        text = f"{record.padding:.0%} of the positions are padding; set `data.padding_free` or `data.group_by_length`"
        yield record.padding * computing, f"{text} to true"
    if planned.rounded is not None:
        text = f"it computes in fp32, and bf16 is planned at {planned.rounded / planned.seconds:.0%} of the time"
        yield planned.seconds - planned.rounded, f"{text}; set `precision=bf16`"
    host, device = seconds.get(STEP, 0.0), seconds.get(DEVICE, 0.0)
    if is_alone and host >= _LATE_HOST * (host + device):
        yield computing - planned.seconds, f"the GPU waits for the host; {_remedy_of_host(recipe)}"


def _remedy_of_host(recipe: Recipe) -> str:
    from trainer.recipe.graphs_choice import auto_obstacle

    obstacle = auto_obstacle(recipe)
    if obstacle is not None:
        return f"CUDA graphs are off ({obstacle}); use a larger `training.micro_batch_size`"
    if recipe.cuda_graphs is False:
        return 'set `cuda_graphs` to "auto"'
    return "use a larger `training.micro_batch_size`"
