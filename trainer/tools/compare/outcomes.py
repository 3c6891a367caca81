"""`trainer compare --seeds`: recipes that train to their end with the same seeds, and their last evaluations."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from trainer.base.errors import UsageError
from trainer.base.text import aligned
from trainer.observe.metrics_file import encode_number
from trainer.observe.summary import format_decimal
from trainer.recipe.schema import Recipe
from trainer.tasks.metrics.table import greater_is_better
from trainer.tools.compare.contestants import Contestant
from trainer.tools.compare.seeds import SeededRecipe, finished, interval, train_all, write_results
from trainer.tools.compare.turns import first_line
from trainer.tools.report.page import Section, Table, render


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
    recipes = [SeededRecipe(one.name, recipe, [*common, *one.overrides], one.processes) for one in contestants]
    _require_the_same_rows([one.loaded for one in recipes])
    metric = recipes[0].metric
    echo(f"{len(outcomes)} recipes, {seeds} seeds each to the end of training, in {folder}")
    trained = train_all(recipes, seeds, [metric], folder, echo)
    for place, (one, scores) in enumerate(zip(outcomes, trained.scores, strict=True)):
        one.values = {seed: metrics[metric] for seed, metrics in scores.items()}
        one.reason = trained.reasons.get(place)
    for one in outcomes[1:]:
        one.difference, one.half = paired(one.values, outcomes[0].values)
    lines = [*_lines(outcomes, metric)]
    content = {**facts, "metric": metric, "larger_is_better": greater_is_better(metric)}
    content["results"] = [one.as_object() for one in outcomes]
    table = Table(("", metric, "difference", "verdict"), [_cells(one, outcomes[0], metric) for one in outcomes])
    notes = [line for line in lines if not line.startswith(" ")]
    page = render(f"Comparison of {recipe}", [Section("Metrics", [table, *notes])])
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    write_results(folder, {"compare.json": text, "compare.html": page})
    echo("")
    for line in lines:
        echo(line)
    echo(f"wrote     {folder / 'compare.html'} and compare.json")
    return finished(trained, is_good=True)


def paired(values: Mapping[int, float], reference: Mapping[int, float]) -> tuple[float | None, float | None]:
    """Return the mean difference over the seeds that both have, and half of its 95 % interval; None: too few seeds."""
    found = [value - reference[seed] for seed, value in values.items() if seed in reference]
    return interval(found) if found else (None, None)


def _require_the_same_rows(recipes: Sequence[Recipe]) -> None:
    if any(
        (one.data.validation, one.task.metrics) != (recipes[0].data.validation, recipes[0].task.metrics)
        for one in recipes
    ):
        raise UsageError("`--seeds` compares metrics of the same rows, but the recipes differ in `data.validation` or"
                         " `task.metrics`; set them alike")  # fmt: skip


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
