"""The results of a comparison as a table in the terminal, as JSON and as CSV."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trainer.base.disk import replace_text
from trainer.base.text import listed
from trainer.observe.metrics_file import encode_number
from trainer.observe.summary import format_bytes
from trainer.tools.compare.probe import PARTS
from trainer.tools.compare.trial_results import Result
from trainer.tools.compare.turns import first_line

_NOISE = {False: 0.01, True: 0.05}
"""The relative difference of two peaks of memory that is noise, on a GPU and of a process on a CPU."""

HEADER = (
    "", "step", "quartiles", "samples/s", "tokens/s", "compute/comm/rest", "sent", "memory of each rank", "planned",
    "loss and norm",
)  # fmt: skip


def table(results: Sequence[Result], is_cpu: bool, width: int) -> Iterator[str]:
    """Yield the lines of a table, in parts if it is too wide, then the remarks."""
    rows = [HEADER, *(cells(result) for result in results if result.records)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for columns in _fitting(widths, width) if len(rows) > 1 else ():
        for row in rows:
            name, *others = (row[0].ljust(widths[0]), *(row[column].rjust(widths[column]) for column in columns))
            if columns[-1] == len(HEADER) - 1:
                others[-1] = row[-1]
            yield "  ".join([name, *others]).rstrip()
        yield ""
    yield from remarks(results, is_cpu)


def _tie(first: str, tied: Sequence[str]) -> str:
    """Return the subject of a sentence on the best result, with those that differ from it by noise only."""
    others = [name for name in tied if name != first]
    return f"{first} has" if not others else f"{first} and, within the noise, {listed(others, 5)} have"


def _fitting(widths: Sequence[int], width: int) -> Iterator[list[int]]:
    """Yield the columns of each part of a table that is too wide; each part also has the first column."""
    part: list[int] = []
    for column in range(1, len(widths)):
        taken = [0, *part, column]
        if part and sum(widths[one] for one in taken) + 2 * (len(taken) - 1) > width:
            yield part
            part = []
        part.append(column)
    yield part


def remarks(results: Sequence[Result], is_cpu: bool) -> Iterator[str]:
    """Yield the reasons of failures, the layouts that cost least, and a note on the columns of memory."""
    for result in results:
        if result.reason is not None:
            yield f"failed    {result.name}: {first_line(result.reason)}"
        elif not result.records:
            yield f"not run   {result.name}"
    yield from _cheapest([result for result in results if result.step_seconds and result.rank_memory_bytes], is_cpu)
    if compared := [result.likeness for result in results if result.likeness is not None]:
        alike = sum(likeness.leaves is None for likeness in compared)
        yield f"{alike} of {len(compared)} learn the same as the reference, within the tolerances"
    if any(result.records for result in results):
        of_process = " of the whole process" if is_cpu else ""
        yield f"memory is the peak{of_process}; planned is that of the tensors of the heaviest rank, at data.max_length"


def _cheapest(trained: Sequence[Result], is_cpu: bool) -> Iterator[str]:
    """Yield the layouts with the shortest step and with the least memory, if there are several."""
    if len(trained) < 2:
        return
    quartiles = [(one.step_seconds, one.name) for one in trained if one.step_seconds]
    (_, median, slowest), fastest = min(quartiles, key=lambda one: one[0][1])
    # Quartiles that overlap: the median alone would name a winner by noise.
    tied = [name for (low, _, _), name in quartiles if low <= slowest]
    yield f"{_tie(fastest, tied)} the shortest step, {1e3 * median:,.0f} ms"
    peaks = [(max(one.rank_memory_bytes), one.name) for one in trained]
    least, smallest = min(peaks, key=lambda one: one[0])
    tied = [name for peak, name in peaks if peak <= (1 + _NOISE[is_cpu]) * least]
    yield f"{_tie(smallest, tied)} the least memory, {format_bytes(least)} on the fullest rank"
    if is_cpu:
        yield "on a CPU the memory is of the process, and most of it of libraries; planned counts tensors only"


def cells(result: Result) -> tuple[str, ...]:
    """Return the row of a result that trained."""
    assert result.step_seconds is not None
    assert result.samples_per_second is not None
    low, middle, high = result.step_seconds
    shares, plan, tokens = result.shares, result.plan, result.tokens_per_second
    planned_seconds = "" if plan is None or plan.seconds is None else f", {1e3 * plan.seconds:,.0f} ms"
    return (
        result.name,
        f"{1e3 * middle:,.0f} ms",
        f"{1e3 * low:,.0f}-{1e3 * high:,.0f}",
        f"{result.samples_per_second:,.1f}",
        "" if tokens is None else f"{tokens:,.0f}",
        "" if shares is None else "/".join(f"{100 * getattr(shares, name):.0f}" for name in PARTS) + " %",
        "" if shares is None else format_bytes(shares.sent_bytes),
        " ".join(map(format_bytes, result.rank_memory_bytes)),
        "" if plan is None else format_bytes(plan.peak_bytes) + planned_seconds,
        verdict(result),
    )


def verdict(result: Result) -> str:
    """Return whether a result learns as the reference; for another training, its first and last loss."""
    if result.is_reference:
        return "the reference"
    if result.likeness is None:
        if not result.records:
            return ""
        return f"loss {result.records[0].loss:.4g} to {result.records[-1].loss:.4g}"
    largest = f"{_power(result.likeness.loss)}, {_power(result.likeness.grad_norm)}"
    if result.likeness.leaves is None:
        return "equal" if result.likeness.loss == result.likeness.grad_norm == 0 else f"equal within {largest}"
    return f"beyond the tolerance from step {result.likeness.leaves}: {largest}"


def _power(value: float) -> str:
    return "0" if value == 0 else f"{value:.0e}" if math.isfinite(value) else "not finite"


def write(results: Sequence[Result], folder: Path, facts: dict[str, Any]) -> None:
    """Write `compare.json` and `compare.csv` into a folder."""
    content = _finite({**facts, "results": [result.as_object() for result in results]})
    replace_text(folder / "compare.json", json.dumps(content, indent=2, allow_nan=False) + "\n")
    rows, text = [_row(result) for result in results], io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    # Halves of surrogate pairs, such as bytes of the command line that are no UTF-8, have no encoding.
    replace_text(folder / "compare.csv", text.getvalue().encode(errors="backslashreplace").decode())


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return encode_number(value) if isinstance(value, float) else value


def _row(result: Result) -> dict[str, Any]:
    low, middle, high = result.step_seconds or (None, None, None)

    def values(prefix: str, owner: Any, *names: str) -> dict[str, Any]:
        return {f"{prefix}{name}": getattr(owner, name, None) for name in names}

    return {
        "name": result.name,
        "overrides": " ".join(result.overrides),
        **values("", result, "processes", "layout", "kind"),
        "reason": result.reason and first_line(result.reason),
        "step_seconds": middle,
        "step_seconds_low": low,
        "step_seconds_high": high,
        **values("", result, "samples_per_second", "tokens_per_second"),
        **{f"{name}_share": getattr(result.shares, name, None) for name in PARTS},
        **values("", result.shares, "sent_bytes"),
        "peak_memory_bytes": " ".join(map(str, result.rank_memory_bytes)),
        "loss_difference": getattr(result.likeness, "loss", None),
        "grad_norm_difference": getattr(result.likeness, "grad_norm", None),
        "leaves_tolerance_at_step": getattr(result.likeness, "leaves", None),
        "last_loss": result.records[-1].loss if result.records else None,
        **values("planned_", result.plan, "peak_bytes", "sent_bytes", "seconds"),
    }
