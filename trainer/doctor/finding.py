"""What a check answers: one line, and what to do where it is not `ok`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "problem"]

GIB = 2**30
MIB = 2**20


@dataclass(frozen=True)
class Finding:
    """`value` is what was found; `remedy` is None where there is nothing to do."""

    status: Status
    value: str
    remedy: str | None = None


@dataclass(frozen=True)
class Result:
    """A finding with the name and the group of its check: a row of the output, and an object of `--json`."""

    name: str
    group: str
    status: Status
    value: str
    remedy: str | None


def ok(value: str) -> Finding:
    """Nothing to do."""
    return Finding("ok", value)


def warning(value: str, remedy: str) -> Finding:
    """Training works, or works for some recipes; something may go wrong or be slow."""
    return Finding("warning", value, remedy)


def problem(value: str, remedy: str) -> Finding:
    """Training will fail here, or not do what it was asked for."""
    return Finding("problem", value, remedy)


def size(num_bytes: float) -> str:
    """In GiB, or in MiB where that is less than one."""
    return f"{num_bytes / GIB:,.1f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:,.0f} MiB"
