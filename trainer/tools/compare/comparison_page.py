"""The HTML page of a comparison: its table, and figures of time, memory and losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from operator import attrgetter
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from trainer.base.disk import replace_text
from trainer.observe.records import StepRecord
from trainer.tools.compare.probe import PARTS
from trainer.tools.compare.result_table import HEADER, cells, remarks
from trainer.tools.compare.trial_results import Result
from trainer.tools.report.figures import Curve, bars, curves, ranges
from trainer.tools.report.page import Section, Table, render
from trainer.tools.tolerances import difference

_MIB = 2**-20
EQUAL = 1e-9
"""The place of equal values on a logarithmic axis."""


def write_page(results: Sequence[Result], folder: Path, facts: Mapping[str, Any], is_cpu: bool) -> None:
    """Write `compare.html` into a folder.

    `is_cpu`: the ranks ran on a CPU, where memory is that of the whole process.
    """
    trained = [result for result in results if result.records]
    rows = [cells(result) for result in trained]
    sections = [Section("Layouts", [*([Table(HEADER, rows)] if rows else []), *remarks(results, is_cpu)])]
    if trained:
        sections.append(Section("Costs", list(_costs(trained, is_cpu))))
        sections.append(Section("Learning", list(_learning(trained))))
    shown = [(name, _text(value)) for name, value in facts.items() if value]
    sections.append(Section("Facts", [Table(("", ""), shown)]))
    replace_text(folder / "compare.html", render(f"Comparison of {facts['recipe']}", sections))


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {one}" for name, one in value.items())
    return " ".join(value) if isinstance(value, list) else str(value)


def _costs(trained: Sequence[Result], is_cpu: bool) -> Iterator[go.Figure]:
    times = [(one.name, [1e3 * seconds for seconds in one.step_seconds]) for one in trained if one.step_seconds]
    yield ranges("time of a step, median and quartiles", times, "ms")
    names = [result.name for result in trained]
    is_probed = any(result.shares for result in trained)
    if is_probed:
        titles = zip(("compute", "communication, waiting for ranks", "rest"), PARTS, strict=True)
        found = [(title, _numbers(trained, "shares", name, 100)) for title, name in titles]
        yield bars("shares of a step, mean of the ranks", names, found, "%", is_stacked=True)
    if planned := _planned(trained, "peak_bytes"):
        yield bars("planned peak of tensors of the heaviest rank", names, planned, "MiB")
    by_rank = zip_longest(*(result.rank_memory_bytes for result in trained), fillvalue=0)
    memory = [(f"rank {rank}", [count / 2**20 for count in counts]) for rank, counts in enumerate(by_rank)]
    if memory:
        what = "process" if is_cpu else "device"
        yield bars(f"peak memory of the {what} of each rank", names, memory, "MiB")
    if is_probed:
        sent = [("measured", _numbers(trained, "shares", "sent_bytes", _MIB)), *_planned(trained, "sent_bytes")]
        yield bars("bytes sent in a step by the heaviest rank; planned at data.max_length", names, sent, "MiB")


def _planned(trained: Sequence[Result], name: str) -> list[tuple[str, list[float]]]:
    values = _numbers(trained, "plan", name, _MIB)
    return [("planned", values)] if any(values) else []


def _numbers(trained: Sequence[Result], part: str, name: str, factor: float) -> list[float]:
    """Return a number of a part of each result times a factor; 0 for a result without this part."""
    parts = (getattr(one, part) for one in trained)
    return [0 if one is None else factor * getattr(one, name) for one in parts]


def _learning(trained: Sequence[Result]) -> Iterator[go.Figure]:
    def curve(one: Result, value: Callable[[StepRecord], float]) -> Curve:
        return Curve(one.name, [record.step for record in one.records], list(map(value, one.records)))

    for title, name in (("loss", "loss"), ("gradient norm before clipping", "grad_norm")):
        yield curves(title, [curve(one, attrgetter(name)) for one in trained])
    first = next((one for one in trained if one.is_reference), trained[0])
    expected = {record.step: record for record in first.records}
    for title, value in (("loss", attrgetter("loss")), ("gradient norm", attrgetter("grad_norm"))):

        def apart(record: StepRecord, value: Callable[[StepRecord], float] = value) -> float:
            return max(EQUAL, difference(value(record), value(expected[record.step])))

        if found := [curve(one, apart) for one in trained if one.likeness is not None]:
            yield curves(
                f"relative difference of the {title} from the reference; {EQUAL:g} if equal", found, is_log=True
            )
