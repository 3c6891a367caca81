"""The reproduction of a recipe's expected metrics, from its command to its results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.base.errors import UsageError
from trainer.base.text import aligned
from trainer.launch.local import number_of_ranks
from trainer.observe.metrics_file import encode_number, encode_numbers
from trainer.observe.summary import format_decimal
from trainer.ranks.environment import detect
from trainer.recipe.reading.loading import load_recipe
from trainer.tools.compare.seeds import SeededRecipe, finished, interval, shown, train_all, write_results
from trainer.tools.expected import SEEDS, SOURCE
from trainer.tools.report.page import Section, Table, render

JSON, PAGE = "reproduce.json", "reproduce.html"
_RULE = (
    "A metric is reproduced if its mean over the seeds, at the last evaluation, is within the expected interval. ± is"
    " half of the 95 % interval of the mean (Student's t)."
)
_SEEDS = 3  # of a recipe that names no number


@dataclass(frozen=True)
class ReproduceRequest:
    """The options of `trainer reproduce`."""

    recipe: str  # the name or path of the recipe
    overrides: Sequence[str]
    seeds: int | None  # the number of seeds; None: that of the recipe
    processes: int | None  # the number of ranks; None: one for each GPU, or one
    output: Path | None  # the folder of the results; None: `runs/NAME-reproduce`


@dataclass(frozen=True)
class Reproduced:
    """The values of a metric by seed, beside its expected interval."""

    metric: str
    low: float
    high: float
    values: Sequence[float]

    @property
    def measured(self) -> tuple[float, float | None]:
        """The mean, and half of its interval."""
        return interval(self.values)

    @property
    def is_inside(self) -> bool:
        """Whether the mean is within the expected interval; NaN is not."""
        return self.low <= self.measured[0] <= self.high

    @property
    def verdict(self) -> str:
        """The result for people."""
        value, half = self.measured
        reaches = half is not None and (value - half <= self.high) and (value + half >= self.low)
        if not self.is_inside:
            return "outside, but within the error" if reaches else "outside"
        if half is None:
            return "inside; one seed shows no error"
        is_sure = self.low <= value - half and value + half <= self.high
        return "inside" if is_sure else "inside, but not all of its error"

    def as_object(self) -> dict[str, Any]:
        """Return JSON values."""
        value, half = self.measured
        return {
            "expected": [self.low, self.high],
            "mean": encode_number(value),
            "half": None if half is None else encode_number(half),
            "verdict": self.verdict,
            "reproduced": self.is_inside,
        }


def reproduce(request: ReproduceRequest, echo: Callable[[str], None]) -> int:
    """Train a recipe with each seed, write the results, and return the exit code; `echo` shows a line.

    Raises:
        TrainerError: the recipe expects nothing, a run failed, or the results cannot be written.
    """
    if detect().has_ranks:
        raise UsageError("`trainer reproduce` starts its own ranks; run it without a launcher")
    loaded = load_recipe(request.recipe, request.overrides).recipe
    expects = loaded.expects or {}
    metrics = {key: value for key, value in expects.items() if key not in (SOURCE, SEEDS)}
    if not metrics:
        raise UsageError(
            f"`expects` of {request.recipe} is null, so there is nothing to reproduce; write the expected metrics:"
            ' "expects": {"accuracy": [0.9, 0.93], "source": "..."}'
        )
    if unread := [name for name in metrics if name not in (*loaded.task.metrics, "loss")]:
        raise UsageError(
            f"`expects.{unread[0]}` needs a metric that is not evaluated; `task.metrics` is"
            f" {', '.join(loaded.task.metrics)}; add it there, or remove it"
        )
    number = request.seeds or expects.get(SEEDS, _SEEDS)
    folder = request.output or Path("runs") / f"{loaded.name}-reproduce"
    one = SeededRecipe(loaded.name, request.recipe, request.overrides, number_of_ranks(request.processes))
    echo(f"{loaded.name}, {number} seeds to the end of training, in {folder}")
    trained = train_all([one], number, sorted(metrics), folder, echo)
    scores = trained.scores[0]
    found = [Reproduced(name, low, high, [one[name] for one in scores.values()])
             for name, (low, high) in metrics.items() if scores]  # fmt: skip
    facts = {
        "recipe": request.recipe,
        "overrides": list(request.overrides),
        "processes": one.processes,
        "source": expects[SOURCE],
        "seeds": {str(seed): encode_numbers(values) for seed, values in scores.items()},
        "reason": trained.reasons.get(0),
        "rule": _RULE,
    }
    _write(folder, loaded.name, found, facts)
    for line in _lines(found, facts):
        echo(line)
    echo(f"wrote     {folder / PAGE} and {JSON}")
    return finished(trained, all(row.is_inside for row in found))


def _write(folder: Path, name: str, found: Sequence[Reproduced], facts: Mapping[str, Any]) -> None:
    results = {row.metric: row.as_object() for row in found}
    table = Table(("", "measured", "expected", "verdict"), [_cells(row) for row in found])
    seeds = facts["seeds"]
    rows = [(row.metric, *(format_decimal(value) for value in row.values)) for row in found]
    values = Table(("", *(f"seed {seed}" for seed in seeds)), rows)
    notes = [f"Source: {facts['source']}.", *_notes(facts), _RULE]
    page = render(f"Reproduction of {name}", [Section("Metrics", [table, values, *notes])])
    text = json.dumps({**facts, "metrics": results}, indent=2, allow_nan=False) + "\n"
    write_results(folder, {JSON: text, PAGE: page})


def _lines(found: Sequence[Reproduced], facts: Mapping[str, Any]) -> Iterator[str]:
    yield ""
    if found:
        yield from aligned([("", "measured", "expected", "verdict"), *(_cells(row) for row in found)])
    yield f"source    {facts['source']}"
    yield from _notes(facts)
    yield _RULE


def _notes(facts: Mapping[str, Any]) -> Iterator[str]:
    if facts["reason"]:
        yield f"failed: {facts['reason']}"
    if facts["overrides"]:
        yield f"with {' '.join(facts['overrides'])}, which the source may not have"


def _cells(row: Reproduced) -> tuple[str, str, str, str]:
    return row.metric, shown(*row.measured), f"{row.low:g} to {row.high:g}", row.verdict
