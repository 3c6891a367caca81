"""Explain where the time of a run went, and offer changes of one key with the gain that is planned for each.

A change is a candidate only if the recipe allows it and the training stays the same; one that changes the rounding is
marked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from math import ceil, isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from trainer.base.disk import replace_text
from trainer.base.errors import TrainerError, UsageError, storage_error
from trainer.base.text import aligned
from trainer.observe.records import CHECKPOINT, COMPILATION, EVALUATION, ROWS
from trainer.observe.summary import format_seconds
from trainer.recipe.plan import BatchPlan, plan_run
from trainer.recipe.reading.loading import ResolvedRecipe, load_recipe
from trainer.recipe.schema import Interval
from trainer.recipe.strategies import STRATEGIES
from trainer.tools.compare.contestants import Contestant, Kind, kind_of
from trainer.tools.compare.trial_results import warm_up
from trainer.tools.compare.turns import Comparison, Trial, first_line
from trainer.tools.plan.hardware import Devices, device_named, parse_devices
from trainer.tools.plan.recipe_plan import RecipePlan, plan_recipe
from trainer.tools.report.runs import Run, read_run
from trainer.tools.report.time_parts import COMMUNICATION, HOST, WAITING, TimeParts, time_parts
from trainer.tools.utilisation import FIRST_STEP, Planned, mean_length, shortfall

_FOLDER = "why"  # in the folder of the run
_MOST_CHANGES = 3
_LEAST_SHARE = 0.01  # of the wall time; a smaller gain is not offered
_LARGE_SHARE = 0.05  # of the wall time; a smaller part is no reason to plan changes of it
_LITTLE = 0.02  # the share of evaluations and checkpoints after a change
_WORKERS = 2  # twice the processes that prepare batches, and these without any
_LAST_STEPS = 5  # records of a mixture of experts
_UNUSED, _UNEVEN = 0.5, 1.5  # the share of experts without tokens, and the load of a rank, for notes
_WIDTH = 64  # tokens; texts of compiled models are padded to a multiple of at most this


@dataclass(frozen=True)
class Change:
    """A change of one key, and its gain.

    `gain` are the seconds of the whole run that are predicted, by the plan or by arithmetic on measured parts.
    """

    override: str
    gain: float
    basis: str  # the source of the gain
    kind: Kind  # `layout`: the same training; `precision`: other rounding


@dataclass(frozen=True)
class Verified:
    """The seconds of a step of a change and of the recipe, with evaluations; `reason` if they were not measured."""

    override: str
    before: float | None = None
    after: float | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Explanation:
    """The time of a run, its changes, and the measurements of these."""

    run: Run
    parts: TimeParts
    changes: tuple[Change, ...]
    batch: BatchPlan
    notes: tuple[str, ...]
    verified: tuple[Verified, ...] = field(default=())

    @property
    def cause(self) -> str:
        """The largest cause in words."""
        largest = self.parts.largest
        if largest is None:
            return "none"
        if largest == HOST:
            rows, number = self.batch.micro_batch_size, self.batch.num_microbatches
            size, passes = f"{rows} row{'s' * (rows != 1)}", f"{number} microbatch{'es' * (number != 1)}"
            return f"{self.parts.meaning(HOST)}, in {passes} of {size} a step"
        return self.parts.meaning(largest)

    def as_object(self) -> dict[str, Any]:
        """Return JSON values; times are seconds of the whole run."""
        parts = self.parts
        return {
            "run": str(self.run.folder),
            "total": parts.total,
            "seconds": dict(parts.seconds),
            "largest": parts.largest,
            "cause": self.cause,
            "slowest_rank": parts.slowest,
            "padding": parts.padding,
            "mfu": parts.mfu,
            "changes": [asdict(one) for one in self.changes],
            "verified": [asdict(one) for one in self.verified],
            "notes": [*parts.notes, *self.notes],
        }


def explain(folder: Path, hardware: str | None, steps: int | None, show: Callable[[str], None]) -> Explanation:
    """Explain the time of a run.

    Args:
        folder: its folder.
        hardware: a device as in `trainer plan --gpus`; None: the device of the run, if it is known.
        steps: the steps of each turn that measures a change; None: measure none.
        show: shows a line of progress.

    Raises:
        UsageError: the folder is no run, or its metrics have no times or impossible ones.
        RecipeError: its recipe is wrong.
    """
    run = read_run(folder)
    parts = time_parts(run.metrics)
    if parts is None:
        raise UsageError(
            f"{str(folder)!r} must hold the times of steps, but its metrics.jsonl has none; train it by this version"
            " until a step is logged"
        )
    world_size = int(run.info.get("world_size", 1))
    are_finite = isfinite(parts.total) and isfinite(parts.mfu or 0.0)
    if world_size < 1 or not are_finite or not 0 <= (parts.padding or 0.0) <= 1:
        raise UsageError(
            f"{str(folder)!r} must hold finite times, padding from 0 to 1 and at least one rank, but its metrics.jsonl"
            " was edited; train it again"
        )
    if hardware is not None:
        parse_devices(f"1x{hardware}")
    with _recipe_file(run, is_kept=steps is not None) as recipe:
        advisor = _Advisor(recipe, run, parts, _devices(run, hardware, world_size))
        changes = advisor.changes()
        advisor.note_speed()
        advisor.note_experts()
        made = Explanation(run, parts, tuple(changes), advisor.batch, tuple(advisor.notes))
        if steps is None or not changes:
            return made
        return replace(made, verified=tuple(_verified(recipe, changes, world_size, steps, show)))


@contextmanager
def _recipe_file(run: Run, is_kept: bool) -> Iterator[str]:
    """Yield a file with the recipe of a run: in its folder, beside turns that are kept, or in a temporary one."""
    with TemporaryDirectory() as temporary:
        folder = run.folder / _FOLDER if is_kept else Path(temporary)
        if folder.is_symlink():
            raise UsageError(f"{folder} is a link, and turns would be written there; remove it")
        recipe = folder / "recipe.json"
        try:
            folder.mkdir(exist_ok=True)
            replace_text(recipe, json.dumps(run.info.get("recipe"), indent=2) + "\n")
        except OSError as error:
            raise storage_error(f"{recipe} cannot be written ({error.strerror}); make room", error) from error
        yield str(recipe)


def _devices(run: Run, hardware: str | None, world_size: int) -> Devices | None:
    name = hardware or device_named(str(run.info.get("device", "")))
    return None if name is None else parse_devices(f"{world_size}x{name}")


class _Advisor:
    def __init__(self, recipe: str, run: Run, parts: TimeParts, devices: Devices | None) -> None:
        self._recipe, self._run, self._parts, self._devices = recipe, run, parts, devices
        self._own = load_recipe(recipe, needs_data=False).recipe
        self._plan = plan_run(self._own, int(run.info.get("world_size", 1)))
        self.batch = self._plan.batch
        self.notes: list[str] = []
        self._length = self._mean_length()
        self._planned = self._planning([])

    def changes(self) -> list[Change]:
        """Return the changes with the largest gains, the largest first."""
        found: dict[str, Change] = {}
        for word, gain, basis in (*self._arithmetic(), *self._by_plan()):
            other = self._loaded(word)
            if other is None or gain < _LEAST_SHARE * self._parts.total:
                continue
            kind, key = kind_of(other.recipe, self._own), word.partition("=")[0]
            if kind != "training" and (key not in found or found[key].gain < gain):
                found[key] = Change(word, gain, basis, kind)
        return sorted(found.values(), key=lambda change: -change.gain)[:_MOST_CHANGES]

    def note_speed(self) -> None:
        """Add the note of the guard in each run (`watched_speed.py`); none without measured speeds of a CPU."""
        devices = self._devices
        record = next((one for one in self._run.metrics.steps if one.step >= FIRST_STEP), None)
        if record is None or devices is None or devices.machine is None:
            return
        if devices.is_cpu and "measured" not in devices.machine.figures:
            return
        self._length = mean_length(record, self._own)
        is_rounded = self._own.precision == "fp32" and devices.machine.runs_kernels
        own, other = self._planning([]), self._planning(["precision=bf16"]) if is_rounded else None
        if own is None or own.time is None or self._length is None:
            return
        rounded = other.time.likely if other is not None and other.time is not None else None
        planned = Planned(devices.name, self._length, own.time.likely, rounded)
        if (text := shortfall(record, self._own, planned, self._plan.layout.world_size == 1)) is not None:
            self.notes.append(text)

    def note_experts(self) -> None:
        """Add notes on a mixture of experts if its tokens collapse on few of them, or one rank has most of them."""
        found = [step.more for step in self._run.metrics.steps[-_LAST_STEPS:] if "experts_unused" in step.more]
        if not found:
            return
        unused, entropy, most, rank = (
            sum(numbers.get(name, 1.0) for numbers in found) / len(found)
            for name in ("experts_unused", "router_entropy_min", "expert_load_max", "expert_rank_load_max")
        )
        if unused >= _UNUSED:
            self.notes.append(
                f"the routers collapse: in a layer, {unused:.0%} of the experts get no token of a step, the largest"
                f" load is {most:.1f} times the mean, and the least entropy {entropy:.0%} of the possible one; balance"
                " them by `task.router_loss`, such as 0.01, or by `task.router_bias_rate` where routers have biases"
            )
        if rank >= _UNEVEN:
            self.notes.append(
                f"the experts of one rank get {rank:.1f} times the mean of the tokens of a layer, and the other ranks"
                " wait; balance them by `task.router_loss`, such as 0.01, or by a larger one"
            )

    def _loaded(self, word: str) -> ResolvedRecipe | None:
        with suppress(TrainerError):
            resolved = load_recipe(self._recipe, [word], needs_data=False)
            plan_run(resolved.recipe, self._plan.layout.world_size)
            return resolved
        return None

    def _share(self, *names: str) -> float:
        return sum(self._parts.seconds.get(name, 0.0) for name in names) / self._parts.total

    def _arithmetic(self) -> Iterator[tuple[str, float, str]]:
        """Yield overrides with gains that follow from measured parts."""
        recipe, seconds, steps = self._own, self._parts.seconds, self._parts.of_steps
        if rows := seconds.get(ROWS, 0.0):
            old = recipe.data.num_workers
            new = 2 * old or _WORKERS
            # Workers prepare rows while a step runs. With some already, their work lasts as long as both.
            left = max(0.0, (rows + steps) * old / new - steps if old else rows / new - steps)
            yield f"data.num_workers={new}", rows - left, "rows are prepared while a step runs"
        if self._parts.padded:
            yield "data.padding_free=true", self._parts.padded, "the measured padding"
            if (multiple := recipe.data.pad_to) > 1 and self._length:
                # Half of a multiple is padded on average.
                gain = self._parts.padded * min(1.0, (multiple - 1) / 2 / (self._length * (self._parts.padding or 1.0)))
                yield "data.pad_to=1", gain, "the padding to a multiple, if widths are spread evenly"
        yield from self._fewer_widths()
        if recipe.evaluation.patience is None and recipe.evaluation.every is not None:
            yield from self._rarer("evaluation.every", recipe.evaluation.every, EVALUATION)
        if recipe.checkpoint.every is not None:
            yield from self._rarer("checkpoint.every", recipe.checkpoint.every, CHECKPOINT)
            if not recipe.checkpoint.asynchronous:
                gain = seconds.get(CHECKPOINT, 0.0) / 2
                yield "checkpoint.asynchronous=true", gain, "half of the measured time, a guess"

    def _fewer_widths(self) -> Iterator[tuple[str, float, str]]:
        """Yield a coarser padding, with which fewer widths of texts are compiled."""
        graphs = (self._run.end.get("compilation") or {}).get("graphs") or 0
        compiled, longest = self._parts.seconds.get(COMPILATION, 0.0), getattr(self._own.data, "max_length", None)
        if not compiled or not longest:
            return
        # A divisor of the longest length, so that the longest texts need no width of their own.
        width = next(size for size in range(min(_WIDTH, longest), 0, -1) if longest % size == 0)
        if graphs > (widths := longest // width):
            basis = f"at most {widths} width{'s' * (widths != 1)} of texts to compile, instead of {graphs} graphs"
            yield f"data.pad_to={width}", compiled * (1 - widths / graphs), basis

    def _rarer(self, key: str, every: Interval, part: str) -> Iterator[tuple[str, float, str]]:
        """Yield a longer interval, with which a part takes little time; it ends once in an epoch at least."""
        spent = self._parts.seconds.get(part, 0.0)
        rest = self._parts.total - spent
        most = self._run.info.get("steps_per_epoch") or every.count
        factor = ceil(spent / (_LITTLE * rest)) if rest else 1
        count = min(factor * every.count, max(most, every.count)) if every.unit == "steps" else every.count
        if count > every.count:
            gain = spent * (1 - every.count / count)
            yield f"{key}={Interval(count, every.unit)}", gain, "the measured time, fewer times"

    def _by_plan(self) -> Iterator[tuple[str, float, str]]:
        """Yield overrides with gains that follow from planned steps."""
        own = self._planned
        if own is None or own.time is None or self._parts.of_steps < _LARGE_SHARE * self._parts.total:
            return
        for word in self._candidates(own.devices):
            other = self._planning([word])
            if other is not None and other.time is not None and other.fits:
                gain = self._parts.of_steps * (1 - other.time.likely / own.time.likely)
                yield word, gain, f"planned: {other.time.likely / own.time.likely:.0%} of the time of a step"

    def _candidates(self, devices: Devices) -> Iterator[str]:
        recipe, batch = self._own, self.batch
        if recipe.training.micro_batch_tokens is None:
            whole = batch.rank_batch_size
            sizes = {whole, ceil(whole / 2), ceil(whole / 4)}
            yield from (f"training.micro_batch_size={size}" for size in sizes if size > batch.micro_batch_size)
        if recipe.activation_checkpointing != "none":
            yield "activation_checkpointing=none"
        if not devices.is_cpu:
            if recipe.precision == "fp32":
                yield "precision=bf16"
            if recipe.cuda_graphs is False and self._share(HOST) > _LARGE_SHARE:
                yield "cuda_graphs=true"
        if self._plan.layout.world_size > 1 and self._share(COMMUNICATION, WAITING) > _LARGE_SHARE:
            for row in STRATEGIES.values():
                if row.name != recipe.parallel.strategy and not row.single_process and not row.groups:
                    yield f"parallel.strategy={row.name}"

    def _planning(self, words: list[str]) -> RecipePlan | None:
        if self._devices is None:
            self.notes = ["the speed of the device is unknown, so that no step was planned; name it by --hardware"]
            return None
        try:
            return plan_recipe(load_recipe(self._recipe, words, needs_data=False), self._devices, 1, self._length)
        except (TrainerError, RuntimeError) as error:  # torch's errors of an edited recipe, or of its rows
            if not words:
                self.notes = [f"no step was planned: {first_line(str(error))}"]
            return None

    def _mean_length(self) -> int | None:
        steps = self._run.metrics.steps
        if not steps or not steps[-1].tokens or not steps[-1].samples:
            return None
        # Tokens leave the padding out, and a plan needs the widths with it.
        # Metrics may state that all positions are padding, and the division needs a positive share.
        width = steps[-1].tokens / steps[-1].samples / max(1e-3, 1 - (self._parts.padding or 0.0))
        width /= self._own.task.texts_per_row or 1
        return max(1, min(round(width), getattr(self._own.data, "max_length", None) or round(width)))


def _verified(
    recipe: str, changes: list[Change], world_size: int, steps: int, show: Callable[[str], None]
) -> Iterator[Verified]:
    """Train the recipe and each change in turns, and yield the seconds of a step."""
    measured = [one for one in changes if not one.override.startswith("checkpoint.")]
    found = [Contestant((), world_size), *(Contestant((one.override,), world_size) for one in measured)]
    comparison = Comparison(recipe, [], found, steps, Path(recipe).parent, evaluates=True)
    comparison.run(show)
    reference, *others = comparison.trials
    before, trials = _step_seconds(reference), dict(zip((one.override for one in measured), others, strict=True))
    for one in changes:
        if (trial := trials.get(one.override)) is None:
            yield Verified(one.override, reason="turns write no checkpoints")
        elif (reason := reference.reason or trial.reason) is not None:
            yield Verified(one.override, reason=first_line(reason))
        else:
            yield Verified(one.override, before, _step_seconds(trial))


def _step_seconds(trial: Trial) -> float | None:
    """Return the mean seconds of a step after the warm-up, with rows and evaluations."""
    steps = [step for turn in trial.turns for step in turn.steps[warm_up(len(turn.steps)) :]]
    seconds = [sum(step.seconds.values()) for step in steps]
    return sum(seconds) / len(seconds) if seconds else None


def lines(found: Explanation) -> Iterator[str]:
    """Yield the explanation as lines."""
    parts = found.parts
    yield f"{found.run.name}: {format_seconds(parts.total)} until step {found.run.last_step}, {found.run.state}"
    rows = [
        (f"{time / parts.total:.1%}".rjust(6), f"{time:.1f} s".rjust(10), parts.meaning(part))
        for part, time in parts.seconds.items()
    ]
    yield from (f"  {line}" for line in aligned(rows))
    facts = {"padding": parts.padding, "the device's peak": parts.mfu}
    yield from (f"{name:<18}{value:.1%}" for name, value in facts.items() if value is not None)
    yield f"largest cause     {found.cause}"
    for note in (*parts.notes, *found.notes):
        yield f"note: {note}"
    verified: Mapping[str, Verified] = {one.override: one for one in found.verified}
    for one in found.changes:
        rounding = ", changes the rounding" if one.kind == "precision" else ""
        yield f"change {one.override}: {one.gain / parts.total:.0%} of the time less ({one.basis}{rounding})"
        if (measured := verified.get(one.override)) is not None:
            before, after = measured.before, measured.after
            if before is None or after is None:
                yield f"  not measured: {measured.reason}"
            else:
                yield f"  measured: {before:.3g} s a step, then {after:.3g} s; {1 - after / before:+.0%} saved"
    if not found.changes:
        yield "no change of one key is planned to save a hundredth of the time"
