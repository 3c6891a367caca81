"""A suite from its command to its results: one table, one page, and the mean over the recipes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from trainer.base.errors import UsageError
from trainer.base.text import aligned
from trainer.launch.local import number_of_ranks
from trainer.observe.metrics_file import encode_number, encode_numbers
from trainer.observe.summary import format_decimal
from trainer.ranks.environment import detect
from trainer.tasks.metrics.table import greater_is_better
from trainer.tools.compare.seeds import SeededRecipe, finished, interval, shown, train_all, write_results
from trainer.tools.compare.turns import first_line, folder_name
from trainer.tools.report.page import Section, Table, render
from trainer.tools.suite.listing import Entry, read_suite
from trainer.use.trained import folder_with

JSON, PAGE = "suite.json", "suite.html"
_RULE = (
    "The score of a recipe is the plain mean of its metrics at the last evaluation; the mean is that of the scores. ±"
    " is half of the 95 % interval over the seeds (Student's t)."
)
_CONFIG = "config.json"


@dataclass(frozen=True)
class SuiteRequest:
    """The options of `trainer suite`."""

    source: str  # a file, or the name of a shipped list
    overrides: Sequence[str]  # of all recipes
    model: str | None  # a run, a folder of a model, or a name on the hub; None: the models of the recipes
    seeds: int
    processes: int | None  # the number of ranks; None: one for each GPU, or one
    output: Path | None  # the folder of the results; None: `runs/SUITE-MODEL`


@dataclass(frozen=True)
class Row:
    """A recipe of a suite, with the metrics of its score, and its scores by seed; `reason` if it failed."""

    one: SeededRecipe
    metrics: Sequence[str]
    scale: float
    seeds: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    reason: str | None = None

    @property
    def scores(self) -> list[float]:
        """The score with each seed."""
        return [self.scale * fmean(found[name] for name in self.metrics) for found in self.seeds.values()]

    def as_object(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "name": self.one.name,
            "recipe": self.one.recipe,
            "overrides": list(self.one.words),
            "metrics": list(self.metrics),
            "scale": self.scale,
            "seeds": {str(seed): encode_numbers(values) for seed, values in self.seeds.items()},
            **_object(self.scores),
            "reason": self.reason,
        }


def run_suite(request: SuiteRequest, echo: Callable[[str], None]) -> int:
    """Train all recipes with each seed, write the results, and return the exit code; `echo` shows a line.

    Raises:
        TrainerError: the list or a recipe of it is wrong, or the results cannot be written.
    """
    if detect().has_ranks:
        raise UsageError("`trainer suite` starts its own ranks; run it without a launcher")
    suite, place = read_suite(request.source)
    words = [*_of_model(request.model), *request.overrides]
    ranks = number_of_ranks(request.processes)
    rows = [_row(entry, place, words, ranks) for entry in suite.entries]
    names = [row.one.name for row in rows]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"the suite {suite.name} has {repeated[0]!r} more than once; give each entry a `name`")
    model = "recipes" if request.model is None else folder_name(Path(request.model).name)
    folder = request.output or Path("runs") / f"{folder_name(suite.name)}-{model}"
    echo(f"{suite.name}: {len(rows)} recipes, {request.seeds} seeds each to the end of training, in {folder}")
    trained = train_all([row.one for row in rows], request.seeds, (), folder, echo)
    rows = [
        replace(row, seeds=trained.scores[number], reason=trained.reasons.get(number))
        for number, row in enumerate(rows)
    ]
    means = _means(rows)
    notes = [*([f"{suite.note}"] if suite.note else []), _RULE]
    facts = {"suite": suite.name, "model": request.model, "overrides": list(request.overrides), "processes": ranks}
    content = {**facts, "results": [row.as_object() for row in rows], "mean": _object(means), "notes": notes}
    table = Table(("", "metrics", "score", "seeds"), _cells(rows, means))
    reasons = [f"failed: {row.one.name}: {first_line(row.reason)}" for row in rows if row.reason]
    title = f"{suite.name} over {request.model or 'the models of the recipes'}"
    page = render(title, [Section("Scores", [table, *reasons, *notes])])
    write_results(folder, {JSON: json.dumps(content, indent=2, allow_nan=False) + "\n", PAGE: page})
    for line in ["", *aligned([table.header, *table.rows]), *reasons, *notes]:
        echo(line)
    echo(f"wrote     {folder / PAGE} and {JSON}")
    return finished(trained, is_good=True)


def _of_model(model: str | None) -> list[str]:
    """Return the overrides that replace model and tokenizer of a recipe; it expects the metrics of another model."""
    if model is None:
        return ["expects=null"]
    place = Path(model).expanduser()
    found = folder_with(place, _CONFIG)
    if found is None and place.exists():
        raise UsageError(f"`--model` must be a run or a folder of a model, but {model} has no {_CONFIG}; name another")
    unset = (f"{key}=null" for key in ("expects", "model.revision", "model.config", "model.tokenizer"))
    return [f"model.name_or_path={found or model}", *unset]


def _row(entry: Entry, place: Path, words: Sequence[str], processes: int) -> Row:
    beside = place / entry.recipe
    recipe = str(beside) if beside.is_file() else entry.recipe
    given = {word.partition("=")[0] for word in words}
    own = [word for word in entry.words if given.isdisjoint(_prefixes(word.partition("=")[0]))]
    one = SeededRecipe(entry.name or Path(entry.recipe).stem, recipe, [*own, *words], processes)
    metrics = entry.metrics or [one.metric]
    known = (*one.loaded.task.metrics, "loss")
    if unread := [name for name in metrics if name not in known]:
        raise UsageError(f"`metrics` of {one.name} has {unread[0]!r}, which is not evaluated; use {', '.join(known)}")
    if poor := [name for name in metrics if not greater_is_better(name)]:
        raise UsageError(f"`metrics` of {one.name} has {poor[0]!r}, of which less is better; a mean needs others")
    return Row(one, metrics, entry.scale)


def _prefixes(key: str) -> list[str]:
    """Return a key and the sections around it."""
    parts = key.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]


def _means(rows: Sequence[Row]) -> list[float]:
    """Return the mean over the recipes with each seed that all of them have."""
    number = min(len(row.scores) for row in rows)
    return [fmean(row.scores[seed] for row in rows) for seed in range(number)]


def _object(scores: Sequence[float]) -> dict[str, Any]:
    value, half = interval(scores) if scores else (None, None)
    return {
        "score": None if value is None else encode_number(value),
        "half": None if half is None else encode_number(half),
    }


def _cells(rows: Sequence[Row], means: Sequence[float]) -> list[tuple[str, ...]]:
    factors = [f" x {row.scale:g}" if row.scale != 1 else "" for row in rows]
    lines = [(row.one.name, ", ".join(row.metrics) + factor, row.scores)
             for row, factor in zip(rows, factors, strict=True)]  # fmt: skip
    return [*_formatted(lines), *_formatted([("mean", "", means)])]


def _formatted(lines: Sequence[tuple[str, str, Sequence[float]]]) -> Iterator[tuple[str, ...]]:
    for name, metrics, scores in lines:
        values = ", ".join(map(format_decimal, scores))
        yield name, metrics, shown(*interval(scores)) if scores else "", values
