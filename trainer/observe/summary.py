"""Texts for the user: this module composes every line of the terminal, and prints none."""

from __future__ import annotations

import json
import math
import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import asdict

from trainer.base.errors import ExitCode
from trainer.base.text import aligned
from trainer.observe.records import EndRecord, EvaluationRecord, RunInfo, StepRecord

_LABEL_WIDTH = 12
_BARS = "▁▂▃▄▅▆▇█"
_CURVE_BARS = 30
TEXT_WIDTH = 80  # of summaries: the width of a classic terminal, which a README shows without a scroll bar


def format_decimal(value: float) -> str:
    """Format with four decimals, or with a power of ten if the number is too small or too large for these."""
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.2e}"


def format_bytes(num_bytes: float) -> str:
    """Format in binary units: 1536 is "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def format_rate(value: float) -> str:
    """Format with three significant digits: 0.0123, 8.12, 812, 33.1k, 1.20M."""
    for factor, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        # From 999.5 on, three digits round to 1000, which needs the next unit.
        if value >= factor * 0.9995:
            return f"{value / factor:#.3g}".rstrip(".") + suffix
    return f"{value:#.3g}".rstrip(".")


def format_seconds(seconds: float) -> str:
    """Format as hours, minutes and seconds: 0:01:12."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def _row(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        TEXT_WIDTH,
        initial_indent=f"  {label:<{_LABEL_WIDTH}}",
        subsequent_indent=" " * (_LABEL_WIDTH + 2),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _parameters_text(run: RunInfo) -> str:
    """Return the numbers of parameters by placement, and the bytes that a rank holds of them and of their state."""
    held = [f"{group.num_parameters:,} {group.placement}" for group in run.parameters if group.num_parameters]
    return f"{', '.join(held)}; {format_bytes(sum(asdict(run.state_bytes).values()))} of state a rank"


def _data_text(run: RunInfo) -> str:
    text = f"{run.num_train_rows:,} training {run.unit}"
    if run.num_validation_rows is not None:
        text += f", {run.num_validation_rows:,} validation {run.unit}"
    if run.classes:
        text += f", {len(run.classes)} classes"
    if run.positive is not None:
        # Labels come from the data; JSON escapes their control characters, which must not reach the terminal.
        text += f"; f1 counts {json.dumps(run.positive, ensure_ascii=False)} as positive"
    return text


def start_summary(run: RunInfo) -> list[str]:
    """Return the eight lines on the model, data, layout and devices of a run that starts; `metrics.jsonl` has more."""
    ranks = "1 rank" if run.world_size == 1 else f"{run.world_size} ranks"
    launcher = {"none": "", "variables": ", given by environment variables"}.get(
        run.launcher, f", started by {run.launcher}"
    )
    weights = run.recipe.get("weights", "fp32")
    weights = "" if weights == "fp32" else f", weights {weights}"
    steps = f"{run.total_steps:,}, {run.steps_per_epoch:,} per epoch"
    if run.resumed_from is not None:
        steps += f"; resuming after step {run.resumed_from:,}"
    rows = {
        "ranks": f"{ranks} on {run.device}{launcher}",
        "layout": f"{run.layout}, {run.strategy}, {run.precision}{weights}",
        "parameters": _parameters_text(run),
        "batch": run.batch,
        "data": _data_text(run),
        "steps": steps,
        "folder": str(run.folder),
    }
    return [run.name, *(f"  {label:<{_LABEL_WIDTH}}{text}" for label, text in rows.items())]


def step_fields(record: StepRecord, seconds_left: float | None) -> list[tuple[str, str]]:
    """Return the displayed names and values of a step, the most important first."""
    fields = [
        ("epoch", f"{record.epoch:.2f}"),
        ("loss", format_decimal(record.loss)),
        ("grad_norm", format_decimal(record.grad_norm)),
        ("lr", f"{record.learning_rate:.2e}"),
        ("samples/s", format_rate(record.samples_per_second)),
    ]
    if record.tokens_per_second is not None:
        fields.append(("tokens/s", format_rate(record.tokens_per_second)))
    if record.mfu is not None:
        fields.append(("mfu", f"{record.mfu:.1%}"))
    fields.append(("memory", format_bytes(record.peak_memory_bytes)))
    if record.loss_scale is not None:
        fields.append(("loss_scale", f"{record.loss_scale:g}"))
    if record.skipped_steps is not None:
        fields.append(("skipped", f"{record.skipped_steps}"))
    if seconds_left is not None:
        fields.append(("left", format_seconds(seconds_left)))
    return fields


# Widths of usual values, which keep consecutive lines aligned.
_FIELD_WIDTHS = {"loss": 6, "grad_norm": 7, "samples/s": 5, "tokens/s": 5, "mfu": 5, "memory": 9}


def step_line(record: StepRecord, total_steps: int, seconds_left: float | None, width: int | None = None) -> str:
    """Return a step as one line of names and values, for readers and for grep; drop those beyond `width`."""
    step = f"step {record.step:>{len(str(total_steps))}}/{total_steps}"
    fields = [f"{name} {value:<{_FIELD_WIDTHS.get(name, 0)}}" for name, value in step_fields(record, seconds_left)]
    # The fields are sorted by importance, so the last ones are dropped.
    while width is not None and fields and len("  ".join([step, *fields]).rstrip()) > width:
        fields.pop()
    return "  ".join([step, *fields]).rstrip()


def evaluation_lines(record: EvaluationRecord) -> list[str]:
    """Return a line of the metrics, and a table of those of parts, such as `f1/LOC`: a row for each part."""
    parts: dict[str, dict[str, str]] = {}
    whole = []
    for name, value in record.metrics.items():
        metric, _, part = name.partition("/")
        if part:
            parts.setdefault(part, {})[metric] = format_decimal(value)
        else:
            whole.append(f"{name} {format_decimal(value)}")
    columns = list(dict.fromkeys(metric for row in parts.values() for metric in row))
    rows = [("", *columns), *((part, *(row.get(name, "") for name in columns)) for part, row in parts.items())]
    title = f"evaluation at step {record.step}: {'  '.join(whole)}"
    return [title, *(f"  {line}" for line in aligned(rows))] if parts else [title]


def _best_text(record: EndRecord, run: RunInfo | None) -> str:
    if record.best is None:
        return "nothing was evaluated"
    text = f"{record.best.name} {format_decimal(record.best.value)} at step {record.best.step}"
    if record.best.name == "accuracy" and run is not None and run.majority is not None:
        text += f" (majority class: {format_decimal(run.majority.share)})"
    return text


def _curve_text(name: str, evaluations: Sequence[EvaluationRecord]) -> str:
    """Return the newest value of a metric, and a bar for each of its last evaluations, from lowest to highest."""
    values = [record.metrics[name] for record in evaluations][-_CURVE_BARS:]
    low = min(filter(math.isfinite, values), default=0.0)
    return f"{name} {format_decimal(values[-1])} at step {evaluations[-1].step}  {bar_text(values, low)}"


def bar_text(values: Sequence[float], low: float = 0.0) -> str:
    """Return a bar for each value, from `low` to the highest one."""
    high = max(filter(math.isfinite, values), default=low)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] if math.isfinite(value) else "?" for value in values)


def end_summary(record: EndRecord, run: RunInfo | None, evaluations: Sequence[EvaluationRecord] = ()) -> list[str]:
    """Return the lines on the outcome of a run and its resumption; none if it failed before it started.

    Args:
        run: the run; None if it never started.
        evaluations: those to show as a curve; one alone is no curve.
    """
    if run is None and record.outcome == "failed":
        return []  # its error on standard error has all that there is
    steps = "1 step" if record.step == 1 else f"{record.step} steps"
    title = f"{record.outcome} after {steps} in {format_seconds(record.seconds)}, exit code {record.exit_code}"
    # The message of a failure follows on standard error.
    message = "" if record.outcome == "failed" else record.message or ""
    lines = [title, *textwrap.wrap(message, TEXT_WIDTH, initial_indent="  ", subsequent_indent="  ")]
    lines += _row("best", _best_text(record, run))
    lines += [line for text in record.warnings for line in _row("warning", text)]
    if len(evaluations) > 1 and record.best is not None:
        lines += _row("last", _curve_text(record.best.name, evaluations))
    if record.pipeline is not None:
        shares = ", ".join(f"{share:.0%}" for share in record.pipeline.measured)
        lines += _row("pipeline", f"idle {shares} of the steps on its ranks; bubble {record.pipeline.bubble:.0%}")
    for row in record.rows:
        lines += [*_row(row.label, row.text), *(f"  {line}" for line in row.lines)]
    if (compiled := record.compilation) is not None:
        breaks = f"{compiled.graph_breaks} graph break{'s' * (compiled.graph_breaks != 1)}"
        graphs = f"{compiled.graphs} graph{'s' * (compiled.graphs != 1)}"
        lines += _row("compiled", f"{graphs} with {breaks}, in {format_seconds(compiled.seconds)}")
    return [*lines, *_next_lines(record, run)]


def _next_lines(record: EndRecord, run: RunInfo | None) -> list[str]:
    """Return the lines on the folders of a run, and on the commands that use them."""
    lines = _row("folder", str(record.folder))
    if run is not None:
        lines.append(f"  {'report':<{_LABEL_WIDTH}}trainer report {shlex.quote(str(record.folder))}")
    if record.model_folder is not None:
        lines += _row("model", str(record.model_folder))
    if record.model_folder is not None and record.best is not None:  # else there may be no rows to evaluate on
        run_folder = shlex.quote(str(record.folder))
        lines.append(f"  {'evaluate':<{_LABEL_WIDTH}}trainer evaluate {run_folder}")
        lines.append(f"  {'predict':<{_LABEL_WIDTH}}trainer predict {run_folder} --input FILE --output FILE")
    # Nothing is left to train, or the same command would fail again.
    if record.exit_code in (ExitCode.DONE, ExitCode.USER, ExitCode.NON_FINITE):
        return lines
    # Never wrapped: users paste this line.
    label = "resume" if record.has_checkpoint else "restart"
    return [*lines, f"  {label:<{_LABEL_WIDTH}}{record.resume_command}"]
