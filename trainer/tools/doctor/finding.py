"""The result of a check, one line, and a remedy unless it is `ok`; and all results as lines or as one JSON object."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import typer

from trainer import __version__
from trainer.base.text import for_terminal

Status = Literal["ok", "warning", "problem"]

GIB = 2**30
MIB = 2**20
_COLOURS: Mapping[Status, str] = {"ok": "green", "warning": "yellow", "problem": "red"}
_LEAST_WIDTH = 60


@dataclass(frozen=True)
class Finding:
    """The status and the value that a check found; `remedy` is None if the status is `ok`."""

    status: Status
    value: str
    remedy: str | None = None


@dataclass(frozen=True)
class Result:
    """A finding with the name and group of its check: a row of the output, and an object of `--json`."""

    name: str
    group: str
    status: Status
    value: str
    remedy: str | None


def ok(value: str) -> Finding:
    return Finding("ok", value)


def warning(value: str, remedy: str) -> Finding:
    """Training works, at least for some recipes, but may fail or be slow."""
    return Finding("warning", value, remedy)


def problem(value: str, remedy: str) -> Finding:
    """Training fails here, or the recipe cannot run."""
    return Finding("problem", value, remedy)


def size(num_bytes: float) -> str:
    """The size in GiB, or in MiB below 1 GiB."""
    return f"{num_bytes / GIB:,.1f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:,.0f} MiB"


def lines(results: Sequence[Result], width: int, verbose: bool = False) -> Iterator[str]:
    """Yield a line for each finding, its remedy below, and a summary at the end.

    The lines have styles; the texts in them are escaped.

    Args:
        verbose: whether to show the groups, and values of more than a line where all is well.
    """
    of_status, of_name = max(map(len, _COLOURS)), max(len(result.name) for result in results)
    indent = " " * (of_status + of_name + 6)
    group, is_cut = None, False
    for result in results:
        if verbose and result.group != group:
            group = result.group
            yield typer.style(group, bold=True)
        head = f"  {typer.style(f'{result.status:<{of_status}}', fg=_COLOURS[result.status])}  {result.name:<{of_name}}"
        parts = _wrapped(result.value, width - len(indent))
        if result.status == "ok" and not verbose and len(parts) > 1:
            parts, is_cut = _wrapped(result.value, width - len(indent) - 4)[:1], True
            parts[0] += " ..."
        for index, part in enumerate(parts):
            yield f"{indent if index else head + '  '}{part}"
        for index, part in enumerate(_wrapped(result.remedy or "", width - len(indent) - 3)):
            yield f"{indent}{'   ' if index else '-> '}{part}"
    counts = [(_count(results, status), status) for status in ("problem", "warning")]
    summary = ", ".join(f"{number or 'no'} {word}{'s' * (number != 1)}" for number, word in counts)
    yield f"\n{summary}{'; --verbose shows whole values' if is_cut else ''}"


def as_object(results: Sequence[Result]) -> dict[str, Any]:
    """Return the object of `--json`."""
    return {
        "trainer": __version__,
        "problems": _count(results, "problem"),
        "warnings": _count(results, "warning"),
        "checks": [asdict(result) for result in results],
    }


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(for_terminal(text), max(_LEAST_WIDTH, width), break_long_words=False, break_on_hyphens=False)


def _count(results: Sequence[Result], status: Status) -> int:
    return sum(result.status == status for result in results)
