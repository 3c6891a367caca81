"""The result of a check: one line, and a remedy unless it is `ok`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "problem"]

GIB = 2**30
MIB = 2**20


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


def bad(value: str, remedy: str, is_needed: bool) -> Finding:
    """A problem if the recipe needs it, else a warning."""
    return Finding("problem" if is_needed else "warning", value, remedy)


def size(num_bytes: float) -> str:
    """The size in GiB, or in MiB below 1 GiB."""
    return f"{num_bytes / GIB:,.1f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:,.0f} MiB"
