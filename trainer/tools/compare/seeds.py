"""Recipes that train to their end with several seeds, and the metrics of their last evaluations.

A run that is complete has a mark in its folder, and the next start of the same command passes it over. One that was
stopped or killed goes on from its last checkpoint.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from trainer.base.digests import digest_of, source_digest
from trainer.base.disk import replace_text
from trainer.base.distribution import versions
from trainer.base.errors import INTERRUPTED, ExitCode, TrainerError, UsageError, storage_error
from trainer.base.extensions import registered
from trainer.base.text import leaves
from trainer.launch.local import run_on_fresh_ranks
from trainer.observe.metrics_file import METRICS_FILE_NAME
from trainer.observe.summary import format_decimal
from trainer.recipe.reading.loading import load_recipe
from trainer.recipe.schema import Recipe
from trainer.tools.compare.turns import Measurement, first_line, folder_name, measured_recipe, require_one_training
from trainer.tools.run_metrics import read_metrics

CONFIDENCE = 0.95
OUTPUT, COMPLETE = "output.txt", "complete.json"


@dataclass(frozen=True)
class SeededRecipe:
    """A recipe with overrides that trains on a number of ranks; `name` is that of its folder.

    Raises:
        RecipeError: the recipe is wrong.
        UsageError: it does not evaluate, or does not train to its end.
    """

    name: str
    recipe: str
    words: Sequence[str]
    processes: int

    def __post_init__(self) -> None:
        require_one_training(self.recipe, self.words)
        if self.loaded.data.validation is None:
            raise UsageError(f"`data.validation` of {self.name} is null, but seeds compare metrics; name a split")
        if self.loaded.evaluation.every is None:
            raise UsageError(
                f"`evaluation.every` of {self.name} is null, but seeds compare metrics; set a number of steps or epochs"
            )
        if self.loaded.training.stop_at_step is not None:
            raise UsageError(
                f"`training.stop_at_step` of {self.name} is set, but runs of seeds train to their end; set"
                " training.max_steps"
            )

    @cached_property
    def loaded(self) -> Recipe:
        """The recipe with its overrides."""
        return load_recipe(self.recipe, self.words).recipe

    @property
    def metric(self) -> str:
        """The metric that selects the best model."""
        return self.loaded.evaluation.best or self.loaded.task.selecting[0]

    def train(self, seed: int, folder: Path) -> Mapping[str, float]:
        """Train with a seed below a folder, unless it is complete, and return the metrics of the last evaluation.

        Raises:
            TrainerError: the run failed.
            KeyboardInterrupt: a signal; the next call goes on from a checkpoint.
        """
        place = folder / "seeds" / f"{folder_name(self.name)}-{self._digest[:8]}" / str(seed)
        is_complete = (place / COMPLETE).exists()
        if is_complete and (found := _last_metrics(place)) is not None:
            return found
        try:
            if is_complete:  # and its records are damaged
                shutil.rmtree(place)
            place.mkdir(parents=True, exist_ok=True)
            self._train(seed, place)
            _keep_records(place)
            replace_text(place / COMPLETE, json.dumps({"overrides": list(self.words)}) + "\n")
        except OSError as error:
            raise storage_error(f"`--output` is {folder}, which cannot be written: {error}", error) from error
        if (found := _last_metrics(place)) is None:
            raise UsageError(f"{place / METRICS_FILE_NAME} must hold an evaluation, but has none; start again")
        return found

    def _train(self, seed: int, place: Path) -> None:
        tiers = (row.name for row in registered("tier"))  # copies elsewhere
        unused = ("evaluation.best", "evaluation.patience", "logging.project", *tiers)
        own = {"training.seed": str(seed), "checkpoint.folder": str(place.resolve()), "checkpoint.keep": "1",
               "checkpoint.resume": "auto", "evaluation.verify_export": "0", "logging.to": '["jsonl"]'}  # fmt: skip
        resolved = measured_recipe(self.recipe, self.words, dict.fromkeys(unused, "null") | own)
        try:
            code = run_on_fresh_ranks(resolved, self.processes, Measurement(place / OUTPUT, None, saves=True))
        except TrainerError as error:
            if error.exit_code == ExitCode.STOPPED:
                raise KeyboardInterrupt from error
            raise
        if code == ExitCode.STOPPED:
            raise KeyboardInterrupt

    @cached_property
    def _digest(self) -> str:
        """A digest of all that decides the metrics, so that other recipes, files and versions have other folders."""
        own = self.loaded.model_dump(mode="json", exclude={"checkpoint", "logging", "expects"})
        return digest_of([own, _files(own), self.processes, versions(), source_digest()])


def _last_metrics(place: Path) -> Mapping[str, float] | None:
    """Return the metrics of the last evaluation of a run; None: there is none that can be read."""
    try:
        return read_metrics(place / METRICS_FILE_NAME).evaluations[-1].metrics
    except (OSError, UsageError, IndexError):
        return None


def _files(values: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    """Return path, size and time of each file that a recipe names, and of those in its folders."""
    named = [Path(leaf) for _, value in leaves(values) for leaf in (value if isinstance(value, list) else [value])
             if isinstance(leaf, str) and Path(leaf).is_absolute()]  # fmt: skip
    files = [file for path in named for file in ([path] if path.is_file() else sorted(path.glob("*")))]
    return [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]


def _keep_records(place: Path) -> None:
    """Delete the checkpoints and models of a complete run, which few need and which are large."""
    for path in place.iterdir():
        if path.is_dir():
            shutil.rmtree(path)


@dataclass(frozen=True)
class Trained:
    """The metrics of each recipe by seed, in the order of the recipes, and the reasons of failures by place."""

    scores: Sequence[dict[int, Mapping[str, float]]]
    reasons: Mapping[int, str]
    is_interrupted: bool


def train_all(
    recipes: Sequence[SeededRecipe], number: int, metrics: Sequence[str], folder: Path, echo: Callable[[str], None]
) -> Trained:
    """Train all recipes with each seed; after a failure, the other seeds of that recipe are left out.

    Args:
        number: the number of seeds.
        metrics: those to show of each run that has them; none: the one that selects the best model.
        echo: shows a line for each run.

    Raises:
        TrainerError: the folder cannot be written.
    """
    scores: list[dict[int, Mapping[str, float]]] = [{} for _ in recipes]
    reasons: dict[int, str] = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error(
            f"`--output` is {folder}, where no folder can be made ({error.strerror}); name another", error
        ) from error
    try:
        # All recipes with the first seed come first, so that an early stop leaves a whole table.
        for turn in range(number):
            for place, one in enumerate(recipes):
                if place in reasons:
                    continue
                seed = one.loaded.training.seed + turn
                try:
                    found = scores[place][seed] = one.train(seed, folder)
                    text = ", ".join(f"{name} {format_decimal(found[name])}" for name in metrics or [one.metric])
                except TrainerError as error:
                    reasons[place] = text = first_line(str(error))
                echo(f"{turn * len(recipes) + place + 1}/{number * len(recipes)} {one.name}, seed {seed}: {text}")
    except KeyboardInterrupt:
        echo("interrupted; these are the complete runs, and the same command continues")
        return Trained(scores, reasons, is_interrupted=True)
    return Trained(scores, reasons, is_interrupted=False)


def write_results(folder: Path, files: Mapping[str, str]) -> None:
    """Write the results of a command, the text of each file by its name.

    Raises:
        TrainerError: the folder cannot be written.
    """
    try:
        for name, text in files.items():
            replace_text(folder / name, text)
    except OSError as error:
        raise storage_error(
            f"`--output` is {folder}, which cannot be written: {error}; make room, or change its permissions, and start"
            " the same command again: it keeps the complete runs",
            error,
        ) from error


def finished(trained: Trained, is_good: bool) -> int:
    """Return the exit code of a command."""
    if trained.is_interrupted:
        return INTERRUPTED
    return ExitCode.DONE if is_good and not trained.reasons else ExitCode.FAILED


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean, and half of its 95 % interval (Student's t); None: fewer than two values."""
    from scipy.stats import sem, t

    if len(values) < 2:
        return fmean(values), None
    return fmean(values), float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * sem(values))


def shown(value: float, half: float | None) -> str:
    """Return a mean with its interval for people."""
    return format_decimal(value) if half is None else f"{format_decimal(value)} ± {format_decimal(half)}"
