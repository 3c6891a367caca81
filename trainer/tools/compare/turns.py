"""The turns of a comparison: each contestant trains in fresh ranks, once in the given order and once in reverse.

A turn that is complete has a mark in its folder, and the next start of the same comparison passes it over.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from trainer.base.digests import digest_of, source_digest
from trainer.base.disk import replace_text
from trainer.base.distribution import versions
from trainer.base.errors import ExitCode, TrainerError, UsageError, storage_error
from trainer.launch.local import run_on_fresh_ranks
from trainer.observe.metrics_file import METRICS_FILE_NAME
from trainer.ranks.environment import LaunchEnvironment
from trainer.ranks.stopping import StopRequest
from trainer.recipe.reading.loading import ResolvedRecipe, load_recipe
from trainer.tools.compare.contestants import Contestant
from trainer.tools.compare.probe import STEPS, Probe, Shares, read_shares
from trainer.tools.run_metrics import Metrics, read_metrics

TURNS = 2
_UNUSED = ("checkpoint.every", "evaluation.every", "evaluation.best", "evaluation.patience", "logging.project")
_OUTPUT, _COMPLETE = "output.txt", "complete.json"


@dataclass(frozen=True)
class Measurement:
    """The work of a rank: the training, with its output in a file."""

    output: Path
    probed: int | None  # the number of steps before those of the probe; None: no probe
    saves: bool = False  # whether to write checkpoints, and the model at the end

    def __call__(self, resolved: ResolvedRecipe, environment: LaunchEnvironment) -> int:
        # Imported in the rank: the parent only starts processes.
        from trainer.training.run import train

        _redirect_output(self.output)
        probe = None if self.probed is None else Probe(self.probed, environment.rank, self.output.parent)
        with StopRequest() as stop:
            return train(resolved, environment, stop, saves=self.saves, observer=probe).exit_code


def measured_words(folder: Path, stop: int, unused: Iterable[str] = _UNUSED) -> dict[str, str]:
    """Return the overrides of a training of `stop` steps that writes its records into a folder, and nothing else."""
    return {
        "training.stop_at_step": str(stop),
        "checkpoint.folder": str(folder.resolve()),
        **dict.fromkeys(unused, "null"),
        "logging.every": "1 steps",
        "logging.to": '["jsonl"]',
    }


def measured_recipe(recipe: str, words: Sequence[str], measured: Mapping[str, str]) -> ResolvedRecipe:
    """Load a recipe with overrides; those of a measurement take precedence.

    Raises:
        UsageError: the recipe is one of several trainings.
    """
    kept = [word for word in words if word.partition("=")[0] not in measured]
    require_one_training(recipe, kept)
    return load_recipe(recipe, [*kept, *(f"{key}={text}" for key, text in measured.items())])


def require_one_training(recipe: str, words: Sequence[str]) -> None:
    """Refuse one of the trainings of a recipe, which trains in the folder of that recipe from an earlier model."""
    if load_recipe(recipe, words, needs_data=False, is_whole=True).chain is not None:
        own = shlex.join([recipe, "stages=null"])
        raise UsageError(
            f"`stages` of {recipe} are trainings of one folder, but this command trains each run in a folder of its"
            f" own; give it the recipe that a stage extends, or {own}, with the keys of the stage, and the model that"
            " it starts from as model.name_or_path=FOLDER"
        )


def train_turn(
    resolved: ResolvedRecipe, processes: int, job: Measurement, place: LaunchEnvironment | None = None
) -> None:
    """Train a measured recipe on fresh ranks, or that of a place, until its `training.stop_at_step`.

    Raises:
        TrainerError: a rank failed.
        KeyboardInterrupt: a signal.
    """
    try:
        code = run_on_fresh_ranks(resolved, processes, job, place)
    except TrainerError as error:
        if error.exit_code == ExitCode.STOPPED:
            raise KeyboardInterrupt from error
        raise
    # Rank 0 of a job alone must see the metrics: the others stop at the same step.
    if code != ExitCode.STOPPED or (place is not None and place.rank):
        return
    written = read_metrics(job.output.parent / METRICS_FILE_NAME).steps
    # Stopped before its last step: a signal has reached the ranks, and not this process.
    if (written[-1].step if written else 0) < (resolved.recipe.training.stop_at_step or 0):
        raise KeyboardInterrupt


def folder_name(name: str) -> str:
    """Return the name of a contestant as a part of the name of a folder."""
    return re.sub(r"[^\w.=-]+", "_", name)[:60]


@dataclass
class Trial:
    """A contestant, its recipe, and the records of its turns; `reason` if it failed."""

    contestant: Contestant
    resolved: ResolvedRecipe | None = None
    turns: list[Metrics] = field(default_factory=list)
    shares: Shares | None = None
    reason: str | None = None


class Comparison:
    """All trials of a comparison.

    The first contestant is the reference. `common` are overrides of all of them. Turns leave out evaluations unless
    `evaluates`.

    Raises:
        UsageError: the folder cannot be made.
    """

    def __init__(
        self,
        recipe: str,
        common: Sequence[str],
        contestants: Sequence[Contestant],
        steps: int,
        folder: Path,
        evaluates: bool = False,
    ) -> None:
        self._unused = [key for key in _UNUSED if not (evaluates and key == "evaluation.every")]
        self._recipe, self._common, self._steps, self.folder = recipe, tuple(common), steps, folder
        self.trials = [Trial(contestant) for contestant in contestants]
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise storage_error(
                f"`--output` is {folder}, where no folder can be made ({error.strerror}); name another", error
            ) from error
        for trial in self.trials:
            try:
                require_one_training(recipe, [*common, *trial.contestant.overrides])
                trial.resolved = load_recipe(recipe, [*common, *trial.contestant.overrides])
            except TrainerError as error:
                trial.reason = str(error)
        if all(trial.resolved is None for trial in self.trials):
            raise UsageError(self.trials[0].reason or "")

    def run(self, show: Callable[[str], None]) -> None:
        """Train all turns that are not complete.

        Raises:
            KeyboardInterrupt: a signal; complete turns are kept.
        """
        # Forwards, then backwards: a machine that slows down steadily costs all contestants the same.
        left = [(turn, trial) for turn in range(TURNS) for trial in self.trials[:: 1 - 2 * (turn % 2)]]
        started, trained = time.monotonic(), 0
        for index, (turn, trial) in enumerate(left):
            if trial.reason is not None or trial.resolved is None:
                continue
            folder = self._place(trial, turn)
            complete = self._kept(trial, folder)
            if complete is None:
                # The probe slows its steps down, so only the last turn has one.
                complete = self._train(trial, folder, probes=turn == TURNS - 1)
                trained += 1
            if complete is None:
                show(f"{index + 1}/{len(left)} {trial.contestant.name}: {first_line(trial.reason)}")
                continue
            trial.turns.append(complete)
            trial.shares = read_shares(folder) or trial.shares
            seconds = (time.monotonic() - started) / max(1, trained) * (len(left) - index - 1)
            rest = f"; about {seconds / 60:.0f} min left" if trained and seconds > 60 else ""
            show(f"{index + 1}/{len(left)} {trial.contestant.name}: {complete.steps[-1].step} steps{rest}")

    def _train(self, trial: Trial, folder: Path, probes: bool) -> Metrics | None:
        """Train one turn, and return its records, or None if it failed."""
        assert trial.resolved is not None
        last = self._last_step(trial)
        most = trial.resolved.recipe.training.max_steps or math.inf
        # The probed steps are further steps: without them in the schedule, there is no probe.
        probed = last if probes and most >= self._steps + STEPS else None
        # `stop_at_step` and not `max_steps`, which would change the schedule of the learning rate.
        stop = last if probed is None else last + STEPS
        shutil.rmtree(folder, ignore_errors=True)  # of a turn that was interrupted
        try:
            folder.mkdir(parents=True)
            measured = measured_words(folder, stop, self._unused)
            resolved = measured_recipe(self._recipe, self._words(trial), measured)
            train_turn(resolved, trial.contestant.processes, Measurement(folder / _OUTPUT, probed))
        except TrainerError as error:
            trial.reason = str(error)
            return None
        except OSError as error:
            raise storage_error(f"`--output` is {self.folder}, which cannot be written: {error}", error) from error
        metrics = self._metrics(trial, folder)
        # The mark is written last, so a turn with a mark is whole.
        replace_text(folder / _COMPLETE, json.dumps({"overrides": self._words(trial)}) + "\n")
        return metrics

    def _kept(self, trial: Trial, folder: Path) -> Metrics | None:
        if not (folder / _COMPLETE).exists():
            return None
        try:
            metrics = self._metrics(trial, folder)
            read_shares(folder)
        except (UsageError, OSError):
            return None
        return metrics if metrics.steps else None

    def _metrics(self, trial: Trial, folder: Path) -> Metrics:
        metrics = read_metrics(folder / METRICS_FILE_NAME)
        return replace(metrics, steps=[step for step in metrics.steps if step.step <= self._last_step(trial)])

    def _words(self, trial: Trial) -> list[str]:
        return [*self._common, *trial.contestant.overrides]

    def _last_step(self, trial: Trial) -> int:
        assert trial.resolved is not None
        return min(self._steps, trial.resolved.recipe.training.max_steps or self._steps)

    def _place(self, trial: Trial, turn: int) -> Path:
        """Return the folder of a turn; other recipes, steps, numbers of ranks and versions have other folders."""
        assert trial.resolved is not None
        recipe = trial.resolved.recipe.model_dump(mode="json", exclude={"checkpoint", "logging"})
        facts = digest_of([recipe, trial.contestant.processes, self._steps, versions(), source_digest()])
        return self.folder / "turns" / f"{folder_name(trial.contestant.name)}-{facts[:8]}" / str(turn + 1)


def _redirect_output(place: Path) -> None:
    """Append all output of this process to a file, that of libraries too."""
    # The ranks share the file, and with `O_APPEND` no rank writes over the lines of another.
    file = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    sys.stdout.flush()
    # The descriptors and not `sys.stdout`, because libraries in C write to them.
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    os.close(file)


def first_line(text: str | None) -> str:
    """Return the last line of a traceback, or the first line of another message, with the rank that failed."""
    lines = (text or "").strip().splitlines() or [""]
    if any(line.startswith("Traceback ") for line in lines):
        return lines[-1]
    return " ".join(map(str.strip, lines[: 1 + lines[0].endswith(":")]))
