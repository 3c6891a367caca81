"""The report of one or several runs: their curves, the differences of their recipes, and the facts of each.

Its source is `metrics.jsonl`, so that a run can be reported while it trains, after a kill, and years later.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from statistics import median_high
from types import MappingProxyType
from typing import Any

import plotly.graph_objects as go

from trainer.base.errors import UsageError
from trainer.base.text import leaves
from trainer.checkpoint.names import saved_steps
from trainer.observe.records import StepRecord
from trainer.observe.summary import format_bytes, format_decimal, format_rate, format_seconds
from trainer.recipe.plan import plan_run
from trainer.recipe.schema import Recipe
from trainer.tools.report import MISSING
from trainer.tools.report.figures import Curve, Mark, bars, confusion, curves, ranks, reliability, timeline
from trainer.tools.report.page import Section, Table, Text, render
from trainer.tools.report.preview_blocks import preview_blocks
from trainer.tools.report.runs import MOST_STEPS, Run, best_of, best_text, read_runs, seconds_of
from trainer.tools.report.time_parts import MEANINGS, time_parts
from trainer.tools.report.timeline import RUN_BACKWARD, order_of, simulate
from trainer.tools.utilisation import PLANNED_FILE, PlannedRun
from trainer.tools.writing import write_over


def write_report(
    folders: Sequence[Path],
    output: Path | None,
    state: str | None = None,
    planned: Mapping[Path, PlannedRun] = MappingProxyType({}),
) -> Path:
    """Write the HTML page of the runs, and return its path: `report.html` in the first folder if none is given.

    `state` is as in `read_run`, `planned` as in `page_of`.

    Raises:
        UsageError: a folder is no run, or the page cannot be written.
    """
    runs = read_runs(folders, state)
    path = output or folders[0] / "report.html"
    write_over(path, page_of(runs, planned), "--output")
    return path


def page_of(runs: Sequence[Run], planned: Mapping[Path, PlannedRun] = MappingProxyType({})) -> str:
    """Return the HTML page of the runs; `planned` are their plans, by their folders."""
    sections = [Section("Runs", [_overview(runs), *_messages(runs)])]
    if len(runs) > 1:
        sections.append(Section("Differences of the recipes", [_differences(runs)]))
    found = (_training(runs), _evaluation(runs), _logged(runs), _costs(runs))
    sections += [section for section in found if section.blocks]
    previews = [(run, one) for run in runs if (one := run.info.get("preview"))]
    sections += [Section(f"First step of {run.name}", list(preview_blocks(one))) for run, one in previews]
    for run in runs:
        if (table := _planned(run, planned.get(run.folder))) is not None:
            sections.append(Section(f"Plan and measurement of {run.name}", [table]))
    sections += [_facts(run, run.name if len(runs) > 1 else "Facts") for run in runs if run.info]
    return render(" and ".join(run.name for run in runs) if len(runs) < 4 else f"{len(runs)} runs", sections)


def _messages(runs: Sequence[Run]) -> Iterator[str]:
    for run in runs:
        if run.message:
            yield f"{run.name} {run.state}: {run.message}"
    for run in runs:
        yield from (f"{run.name}, warning: {text}" for text in run.end.get("warnings", ()))
    for run in runs:
        if (stride := run.metrics.stride) > 1:
            yield f"{run.name}: the curves have every {stride}th logged step, since a page shows at most {MOST_STEPS:,}"


def _overview(runs: Sequence[Run]) -> Table:
    header = (
        "", "state", "step", "epoch", "loss", "best", "step time", "samples/s", "peak memory", "ranks", "layout",
        "precision",
    )  # fmt: skip
    return Table(header, [(run.name, *_cells(run)) for run in runs])


def _cells(run: Run) -> Iterator[str]:
    info, steps = run.info, run.metrics.steps
    last = steps[-1] if steps else None
    yield run.state
    yield f"{run.last_step} of {info.get('total_steps', '?')}"
    yield f"{last.epoch:.2f}" if last else MISSING
    yield format_decimal(last.loss) if last else MISSING
    yield best_text(run)
    yield f"{median_high(one.step_seconds for one in steps):.3g} s" if last else MISSING
    yield format_rate(median_high(one.samples_per_second for one in steps)) if last else MISSING
    yield format_bytes(max(one.peak_memory_bytes for one in steps)) if last else MISSING
    for name in ("world_size", "layout", "precision"):
        yield str(info.get(name, MISSING))


def _differences(runs: Sequence[Run]) -> Table | str:
    # Without keys that are null: an earlier version may not have had them.
    flat = [
        {
            ".".join(path): one if isinstance(one, str) else json.dumps(one)
            for path, one in leaves(run.info.get("recipe", {}))
            if path and one is not None
        }
        for run in runs
    ]
    names = sorted({name for values in flat for name in values})
    rows = [
        (name, *cells)
        for name in names
        if len(set(cells := [values.get(name, MISSING) for values in flat])) > 1 and name != "checkpoint.folder"
    ]
    return Table(("key", *(run.name for run in runs)), rows) if rows else "The recipes are equal."


def _training(runs: Sequence[Run]) -> Section:
    def of(value: Callable[[StepRecord], float | None], marks: bool = False) -> list[Curve]:
        return [_step_curve(run, value, _marks(run) if marks else ()) for run in runs]

    blocks = [
        curves("loss", of(lambda one: one.loss, True), smooths=True),
        curves("gradient norm before clipping", of(lambda one: one.grad_norm), smooths=True),
        curves("learning rate", of(lambda one: one.learning_rate)),
        curves("loss scale", of(lambda one: one.loss_scale), from_zero=True),
    ]
    return Section("Training", [figure for figure in blocks if _has_points(figure)])


def _evaluation(runs: Sequence[Run]) -> Section:
    names = dict.fromkeys(name for run in runs for one in run.metrics.evaluations for name in one.metrics)
    blocks: list[Any] = []
    if max((len(run.metrics.evaluations) for run in runs), default=0) < 2:
        rows = [(name, *(_last(run.evaluated(name)) for run in runs)) for name in names]
        blocks += [Table(("metric", *(run.name for run in runs)), rows)] if rows else []
    else:
        blocks += [_metric(runs, name) for name in names]
    return Section("Evaluation", [*blocks, *(block for run in runs for block in _pictures(run, len(runs) > 1))])


def _last(points: Sequence[tuple[int, float]]) -> str:
    return format_decimal(points[-1][1]) if points else MISSING


def _metric(runs: Sequence[Run], name: str) -> go.Figure:
    found = []
    for run in runs:
        best = best_of(run.metrics, name)
        marks = [Mark("best", [best.step], "star")] if best else []
        found.append(_curve(run, run.evaluated(name), marks))
    return curves(f"validation {name}", found)


def _logged(runs: Sequence[Run]) -> Section:
    names = dict.fromkeys(name for run in runs for one in run.metrics.logged for name in one.numbers)
    blocks = []
    for name in names:
        of_runs = [[(one.step, one.numbers[name]) for one in run.metrics.logged if name in one.numbers] for run in runs]
        blocks.append(curves(name, [_curve(run, points, ()) for run, points in zip(runs, of_runs, strict=True)]))
    return Section("Numbers of callbacks", blocks)


def _pictures(run: Run, is_named: bool) -> Iterator[Table | go.Figure]:
    """Yield the task's own picture of the last evaluation."""
    last = run.metrics.evaluations[-1] if run.metrics.evaluations else None
    picture = (last and last.picture) or {}
    of_run = f" of {run.name}" if is_named else ""
    if last is not None and "confusion" in picture:
        title = f"validation rows{of_run} at step {last.step}"
        yield confusion(title, picture["classes"], picture["confusion"])
    if last is not None and (points := picture.get("ece")):
        drawn = (points["rows"], points["confidence"], points["right"])
        yield reliability(f"reliability{of_run} at step {last.step}", *drawn)
    if last is not None and (texts := picture.get("texts")):
        rows = [[str(number), *map(str, row.values())] for number, row in enumerate(texts, start=1)]
        yield Table(("row", *texts[0]), rows, f"Texts{of_run} at step {last.step}")


def _planned(run: Run, planned: PlannedRun | None) -> Table | None:
    """Return the planned step of a run beside the measured one: as given, or by `trainer plan --calibrate`."""
    if planned is None:
        with suppress(OSError, ValueError, KeyError, TypeError):
            values = json.loads((run.folder / PLANNED_FILE).read_text(encoding="utf-8"))
            planned = PlannedRun(**{one.name: values[one.name] for one in fields(PlannedRun)})
            list(planned.rows())  # the file may hold anything
    if planned is None:
        return None
    head, *rows = planned.rows()
    return Table(head, rows, f"Plan of {planned.ranks}x{planned.device}")


def _costs(runs: Sequence[Run]) -> Section:
    blocks = [*_time_bars(runs)]
    blocks += [
        curves(title, [_step_curve(run, value) for run in runs], unit, smooths, from_zero=True)
        for title, value, unit, smooths in (
            ("throughput", lambda one: one.samples_per_second, "samples/s", True),
            ("throughput in tokens", lambda one: one.tokens_per_second, "tokens/s", True),
            ("peak memory of the fullest rank", lambda one: one.peak_memory_bytes / 2**20, "MiB", False),
        )
    ]
    memory = [(run.name, [num_bytes / 2**20 for num_bytes in run.rank_peaks]) for run in runs]
    blocks += _rank_bars("peak memory by rank", memory, "MiB")
    idle = [(run.name, [100 * share for share in run.end.get("idle") or ()]) for run in runs]
    blocks += _rank_bars("idle time of the ranks of the pipeline axis", idle, "% of a step")
    blocks += [figure for run in runs if (figure := _timeline(run))]
    return Section("Costs", [figure for figure in blocks if _has_points(figure)])


def _time_bars(runs: Sequence[Run]) -> Iterator[go.Figure]:
    if spent := [(run.name, parts) for run in runs if (parts := time_parts(run.metrics))]:
        shown = [part for part in MEANINGS if any(part in parts.seconds for _, parts in spent)]
        times = [(name, [100 * parts.seconds.get(part, 0.0) / parts.total for part in shown]) for name, parts in spent]
        yield bars("where the time went (trainer why)", shown, times, "% of the wall time")


def _timeline(run: Run) -> go.Figure | None:
    """Return the order of work in the pipeline of a run; None without stages, and for recipes of other versions."""
    if run.key("parallel", "pipeline", "stages") in (None, 1):
        return None
    with suppress(ValueError, UsageError):
        pipeline = plan_run(Recipe.model_validate(run.key()), run.info.get("world_size", 1)).pipeline
        assert pipeline is not None
        weights = {RUN_BACKWARD: 2.0}  # its two halves, and a forward pass, have the weight 1
        found = simulate(order_of(pipeline), lambda action: weights.get(action.kind, 1.0), send=0.0)
        name = f"{run.name}: {pipeline.schedule.name}, with backward passes that take twice as long"
        return timeline(name, found)
    return None


def _rank_bars(title: str, found: Sequence[tuple[str, Sequence[float]]], unit: str) -> Iterator[go.Figure]:
    """Yield the bars of the runs that have numbers of ranks, if there are any."""
    if found := [(name, values) for name, values in found if values]:
        ranks = [f"rank {rank}" for rank in range(max(len(values) for _, values in found))]
        yield bars(title, ranks, found, unit)


def _step_curve(run: Run, value: Callable[[StepRecord], float | None], marks: Sequence[Mark] = ()) -> Curve:
    return _curve(run, [(one.step, found) for one in run.metrics.steps if (found := value(one)) is not None], marks)


def _curve(run: Run, points: Sequence[tuple[int, float]], marks: Sequence[Mark]) -> Curve:
    steps, before = [run.steps_before + step for step, _ in points], run.steps_before
    marks = [replace(mark, steps=[before + step for step in mark.steps]) for mark in marks]
    if before:
        marks.append(Mark("begin of a stage", steps[:1], "diamond"))
    return Curve(run.name, steps, [value for _, value in points], marks)


def _marks(run: Run) -> list[Mark]:
    metrics = run.metrics
    scaled = [one for one in metrics.steps if one.skipped_steps is not None]
    # The count is of the whole training, so it rises where a step was skipped.
    skipped = [b.step for a, b in pairwise(scaled) if (b.skipped_steps or 0) > (a.skipped_steps or 0)]
    resumed = [start["resumed_from"] for start in metrics.runs if start.get("resumed_from")]
    return [
        Mark("bad step", [one.step for one in metrics.bad_steps], "x"),
        Mark("skipped for overflow", skipped, "triangle-down-open"),
        Mark("started again", resumed, "triangle-right"),
        Mark("checkpoint that is kept", saved_steps(run.folder), "circle-open"),
    ]


def _has_points(figure: go.Figure) -> bool:
    return any(len(trace.x) for trace in figure.data)


_KNOWN_FACTS = {
    "launcher": "launcher", "device": "device", "ranks": "world_size", "strategy": "strategy", "layout": "layout",
    "batch": "batch", "training rows": "num_train_rows", "validation rows": "num_validation_rows",
}  # fmt: skip


def _facts(run: Run, title: str) -> Section:
    info = run.info
    facts = [
        ("folder", str(run.folder)),
        *((name, str(info.get(key) or MISSING)) for name, key in _KNOWN_FACTS.items()),
        *_further_facts(info),
        *(("" if number else "pipeline", line) for number, line in enumerate(info.get("stages", ()))),
        ("starts", str(len(run.metrics.runs))),
        ("time of the logged steps", format_seconds(seconds_of(run))),
        ("versions", ", ".join(f"{name} {version}" for name, version in info.get("versions", {}).items())),
    ]
    blocks: list[Any] = [Table(("", ""), facts)]
    if mesh := info.get("ranks"):
        shown = [row for row in mesh[1:] if row[0] != "..."]
        blocks.append(ranks("ranks: equal colours hold the same parameters", mesh[0], shown))
    if groups := info.get("parameters"):
        held = ("placement", "tensors", "parameters", "bytes of the rank that holds most")
        rows = [
            (one["placement"], *(f"{one[name]:,}" for name in ("num_tensors", "num_parameters", "bytes_per_rank")))
            for one in groups
        ]
        blocks.append(Table(held, rows, "Parameters"))
    if table := info.get("groups"):
        blocks.append(Table(table[0], table[1:], "Groups of parameters"))
    if classes := info.get("classes"):
        blocks.append(Table(("class", "training rows"), [(name, f"{rows:,}") for name, rows in classes], "Classes"))
    blocks.append(Text("Recipe, with all defaults", json.dumps(info.get("recipe", {}), indent=2, ensure_ascii=False)))
    return Section(title, blocks)


def _further_facts(info: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the facts that some runs have: the state of a rank, the baseline, and the class that `f1` counts."""
    if sizes := info.get("state_bytes"):
        shown = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items())
        yield "state of a rank", f"{shown}, by formula"
    if majority := info.get("majority"):
        yield "majority class of validation", f"{majority['label']}: {format_decimal(majority['share'])} of the rows"
    if (positive := info.get("positive")) is not None:
        yield "class that f1 counts", str(positive)
