"""`trainer compare --seeds`: recipes that train to their end with the same seeds, and their last evaluations.

A run that is complete has a mark in its folder, and the next start of the same command passes it over.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from trainer.base.digests import digest_of, source_digest
from trainer.base.disk import replace_text
from trainer.base.distribution import versions
from trainer.base.errors import INTERRUPTED, ExitCode, TrainerError, UsageError, storage_error
from trainer.base.text import aligned
from trainer.launch.local import run_on_fresh_ranks
from trainer.observe.metrics_file import METRICS_FILE_NAME, encode_number
from trainer.observe.summary import format_decimal
from trainer.recipe.reading.loading import ResolvedRecipe, load_recipe
from trainer.recipe.schema import Recipe
from trainer.tasks.metrics.table import greater_is_better
from trainer.tools.compare.contestants import Contestant
from trainer.tools.compare.turns import Measurement, first_line, folder_name, measured_recipe
from trainer.tools.report.page import Section, Table, render
from trainer.tools.run_metrics import read_metrics

CONFIDENCE = 0.95


@dataclass
class Outcome:
    """The metric of a contestant with each seed; `reason` if it failed.

    `difference` is the mean of the differences from the reference with the same seed, and `half` half of the width of
    its 95 % interval (Student's t); both are None for the reference.
    """

    contestant: Contestant
    values: dict[int, float] = field(default_factory=dict)
    reason: str | None = None
    difference: float | None = None
    half: float | None = None

    def as_object(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "name": self.contestant.name,
            "overrides": list(self.contestant.overrides),
            "processes": self.contestant.processes,
            "seeds": {str(seed): encode_number(value) for seed, value in self.values.items()},
            "mean": encode_number(mean(self.values.values())) if self.values else None,
            "difference": None if self.difference is None else encode_number(self.difference),
            "half": None if self.half is None else encode_number(self.half),
            "reason": self.reason,
        }


def compare_outcomes(
    recipe: str,
    common: Sequence[str],
    contestants: Sequence[Contestant],
    seeds: int,
    folder: Path,
    facts: Mapping[str, Any],
    echo: Callable[[str], None],
) -> int:
    """Train all contestants with each seed, write the results, and return the exit code.

    Raises:
        TrainerError: no contestant can start, they are not evaluated alike, or the results cannot be written.
    """
    outcomes = [Outcome(one) for one in contestants]
    first = _checked(recipe, common, outcomes)
    metric = first.evaluation.best or first.task.selecting[0]
    echo(f"{len(outcomes)} recipes, {seeds} seeds each to the end of training, in {folder}")
    runs = [(first.training.seed + number, one) for number in range(seeds) for one in outcomes]
    is_interrupted = False
    try:
        for index, (seed, one) in enumerate(runs, start=1):
            if one.reason is not None:
                continue
            words = [*common, *one.contestant.overrides]
            _train(recipe, words, one, seed, metric, folder)
            shown = first_line(one.reason) if one.reason else f"{metric} {format_decimal(one.values[seed])}"
            echo(f"{index}/{len(runs)} {one.contestant.name}, seed {seed}: {shown}")
    except KeyboardInterrupt:
        is_interrupted = True
        echo("interrupted; these are the complete runs, and the same command continues")
    for one in outcomes[1:]:
        one.difference, one.half = paired(one.values, outcomes[0].values)
    lines = [*_lines(outcomes, metric)]
    content = {**facts, "metric": metric, "larger_is_better": greater_is_better(metric)}
    content["results"] = [one.as_object() for one in outcomes]
    replace_text(folder / "compare.json", json.dumps(content, indent=2, allow_nan=False) + "\n")
    table = Table(("", metric, "difference", "verdict"), [_cells(one, outcomes[0], metric) for one in outcomes])
    notes = [line for line in lines if not line.startswith(" ")]
    replace_text(folder / "compare.html", render(f"Comparison of {recipe}", [Section("Metrics", [table, *notes])]))
    echo("")
    for line in lines:
        echo(line)
    echo(f"wrote     {folder / 'compare.html'} and compare.json")
    if is_interrupted:
        return INTERRUPTED
    return ExitCode.DONE if all(one.reason is None for one in outcomes) else ExitCode.FAILED


def paired(values: Mapping[int, float], reference: Mapping[int, float]) -> tuple[float | None, float | None]:
    """Return the mean difference over the seeds that both have, and half of its 95 % interval; None: too few seeds."""
    from scipy.stats import t

    found = [value - reference[seed] for seed, value in values.items() if seed in reference]
    if not found:
        return None, None
    number = len(found)
    if number < 2:
        return found[0], None
    return mean(found), float(t.ppf((1 + CONFIDENCE) / 2, number - 1) * stdev(found) / number**0.5)


def _checked(recipe: str, common: Sequence[str], outcomes: Sequence[Outcome]) -> Recipe:
    """Return the recipe of the reference."""
    loaded: list[Recipe] = []
    for one in outcomes:
        found = load_recipe(recipe, [*common, *one.contestant.overrides]).recipe
        if found.data.validation is None:
            raise UsageError(
                f"`--seeds` compares metrics, but `data.validation` of {one.contestant.name} is null; name a split"
            )
        if found.training.stop_at_step is not None:
            raise UsageError("`--seeds` trains to the end, but `training.stop_at_step` is set; set training.max_steps")
        loaded.append(found)
    if any(
        (one.data.validation, one.task.metrics) != (loaded[0].data.validation, loaded[0].task.metrics) for one in loaded
    ):
        raise UsageError("`--seeds` compares metrics of the same rows, but the recipes differ in `data.validation` or"
                         " `task.metrics`; set them alike")  # fmt: skip
    return loaded[0]


def _train(recipe: str, words: Sequence[str], one: Outcome, seed: int, metric: str, folder: Path) -> None:
    """Train a contestant with a seed, unless it is complete, and keep the metric of the last evaluation."""
    own = load_recipe(recipe, words).recipe.model_dump(mode="json", exclude={"checkpoint", "logging"})
    facts = digest_of([own, _content(own), one.contestant.processes, versions(), source_digest()])
    place = folder / "seeds" / f"{folder_name(one.contestant.name)}-{facts[:8]}" / str(seed)
    mark = place / "complete.json"
    if not mark.exists():
        shutil.rmtree(place, ignore_errors=True)  # of a run that was interrupted
        try:
            place.mkdir(parents=True)
            code = run_on_fresh_ranks(_measured(recipe, words, seed, place), one.contestant.processes,
                                      Measurement(place / "output.txt", None))  # fmt: skip
        except TrainerError as error:
            if error.exit_code == ExitCode.STOPPED:
                raise KeyboardInterrupt from error
            one.reason = str(error)
            return
        except OSError as error:
            raise storage_error(f"`--output` is {folder}, which cannot be written: {error}", error) from error
        if code == ExitCode.STOPPED:
            raise KeyboardInterrupt
        replace_text(mark, json.dumps({"overrides": list(words)}) + "\n")
    evaluations = read_metrics(place / METRICS_FILE_NAME).evaluations
    if not evaluations or metric not in evaluations[-1].metrics:
        one.reason = f"its last evaluation has no {metric}"
        return
    one.values[seed] = evaluations[-1].metrics[metric]


def _measured(recipe: str, words: Sequence[str], seed: int, place: Path) -> ResolvedRecipe:
    """Load a recipe with a seed that evaluates and saves nothing else."""
    unused = dict.fromkeys(("checkpoint.every", "evaluation.best", "evaluation.patience", "logging.project"), "null")
    return measured_recipe(
        recipe,
        words,
        {"training.seed": str(seed), "checkpoint.folder": str(place.resolve()), **unused, "logging.to": '["jsonl"]'},
    )


def _content(values: Mapping[str, Any]) -> str:
    """Return a digest of the files of rows that a recipe leaves out, which a user edits between two starts."""
    named = values["data"].get("leave_out") or []
    files = [Path(one) for one in ([named] if isinstance(named, str) else named)]
    return digest_of([one.read_text(encoding="utf-8", errors="replace") for one in files if one.is_file()])


def _lines(outcomes: Sequence[Outcome], metric: str) -> Iterator[str]:
    trained = [one for one in outcomes if one.values]
    if trained:
        header = ("", metric, "difference", "")
        yield from aligned([header, *(_cells(one, outcomes[0], metric) for one in trained)])
        number = max(len(one.values) for one in trained)
        yield (
            f"means of {number} seeds at the last evaluation; differences from {outcomes[0].contestant.name} with the"
            " same seed, and their 95 % interval"
        )
    for one in outcomes:
        if one.reason is not None:
            yield f"failed    {one.contestant.name}: {first_line(one.reason)}"


def _cells(one: Outcome, first: Outcome, metric: str) -> tuple[str, str, str, str]:
    value = format_decimal(mean(one.values.values())) if one.values else ""
    if one is first:
        return one.contestant.name, value, "", "the reference"
    if one.difference is None:
        return one.contestant.name, value, "", ""
    sign = "+" if one.difference >= 0 else "-"
    shown = f"{sign}{format_decimal(abs(one.difference))}"
    if one.half is None:
        return one.contestant.name, value, shown, "one seed shows no error"
    if abs(one.difference) <= one.half:
        word = "no difference beyond the error"
    else:
        word = "better" if (one.difference > 0) == greater_is_better(metric) else "worse"
    return one.contestant.name, value, f"{shown} ± {format_decimal(one.half)}", word
