"""The findings as lines for a terminal, and as one JSON object."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import typer

from trainer import __version__
from trainer.tools.doctor.finding import Result, Status

_COLOURS: Mapping[Status, str] = {"ok": "green", "warning": "yellow", "problem": "red"}
_LEAST_WIDTH = 60


def lines(results: Sequence[Result], width: int) -> Iterator[str]:
    """Yield a line for each finding under the name of its group, its remedy below, and a summary at the end."""
    of_status, of_name = max(map(len, _COLOURS)), max(len(result.name) for result in results)
    indent = " " * (of_status + of_name + 6)
    group = None
    for result in results:
        if result.group != group:
            group = result.group
            yield typer.style(group, bold=True)
        head = f"  {typer.style(f'{result.status:<{of_status}}', fg=_COLOURS[result.status])}  {result.name:<{of_name}}"
        for index, part in enumerate(_wrapped(result.value, width - len(indent))):
            yield f"{indent if index else head + '  '}{part}"
        for index, part in enumerate(_wrapped(result.remedy or "", width - len(indent) - 3)):
            yield f"{indent}{'   ' if index else '-> '}{part}"
    yield f"\n{_summary(results)}"


def as_object(results: Sequence[Result]) -> dict[str, Any]:
    """Return the object of `--json`."""
    return {
        "trainer": __version__,
        "problems": _count(results, "problem"),
        "warnings": _count(results, "warning"),
        "checks": [asdict(result) for result in results],
    }


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(_LEAST_WIDTH, width), break_long_words=False, break_on_hyphens=False)


def _count(results: Sequence[Result], status: Status) -> int:
    return sum(result.status == status for result in results)


def _summary(results: Sequence[Result]) -> str:
    counts = [(_count(results, status), status) for status in ("problem", "warning")]
    return ", ".join(f"{number or 'no'} {word}{'s' * (number != 1)}" for number, word in counts)
