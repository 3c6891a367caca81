"""The results of a certificate, and its content as JSON."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.base.digests import file_digest
from trainer.base.errors import ExitCode, LostPeerError
from trainer.observe.metrics_file import encode_number
from trainer.tools.certificate.differences import Comparison, Difference
from trainer.tools.certificate.recording import Recording
from trainer.tools.compare.turns import first_line

_FORMAT = 1


class JobEndedError(LostPeerError):
    """The end of a rank of the job, and not of a layout alone."""


@dataclass(frozen=True)
class LayoutResult:
    """A layout beside the reference."""

    name: str
    processes: int
    comparison: Comparison | None = None  # None for the reference, and if it failed
    recording: Recording | None = None
    reason: str | None = None  # of its failure
    cause: str = ""  # the likely one of the first difference
    is_reference: bool = False

    @property
    def is_equal(self) -> bool:
        return self.is_reference or (self.comparison is not None and self.comparison.first is None)

    def sentence(self) -> str:
        """Return the result in one line."""
        if self.reason is not None:
            return f"failed: {first_line(self.reason)}"
        if self.comparison is None:
            return "the reference"
        if self.comparison.first is not None:
            return f"differs: {described(self.comparison.first)}: {self.cause}"
        largest = (f"{place} {one.size:.0e}" for place, one in self.comparison.largest.items() if one.size)
        return f"equal within the tolerances ({', '.join(largest) or 'no difference'})"

    def as_object(self) -> dict[str, Any]:
        """Return JSON values."""
        found = self.comparison
        return {
            "name": self.name,
            "processes": self.processes,
            "is_reference": self.is_reference,
            "equal": self.is_equal,
            "reason": self.reason and first_line(self.reason),
            "steps": [] if found is None else list(found.steps),
            "limits": None if found is None else vars(found.limits),
            "largest": {} if found is None else {place: _object(one) for place, one in found.largest.items()},
            "not_compared": [] if found is None else list(found.not_compared),
            "first_difference": None
            if found is None or found.first is None
            else {**_object(found.first), "cause": self.cause},
            **_curve(self.recording),
        }


@dataclass(frozen=True)
class Certificate:
    """The results of all layouts, and the facts of the machine."""

    results: Sequence[LayoutResult]
    facts: Mapping[str, Any]
    notes: Sequence[str] = field(default=())
    folder: Path | None = None  # of its files

    @property
    def is_equal(self) -> bool:
        """Whether every layout trained and equals the reference."""
        return all(result.is_equal for result in self.results)

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode.DONE if self.is_equal else ExitCode.FAILED

    def as_object(self) -> dict[str, Any]:
        """Return the certificate as JSON values, with a hash of all others."""
        content = {
            "certificate": _FORMAT,
            "equal": self.is_equal,
            **self.facts,
            "notes": list(self.notes),
            "layouts": [result.as_object() for result in self.results],
        }
        content = json.loads(json.dumps(_finite(content)))
        return {**content, "hash": content_hash(content)}


def content_hash(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a certificate without its hash."""
    kept = {key: value for key, value in content.items() if key != "hash"}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def described(one: Difference) -> str:
    """Return where a difference is, and both values."""
    name = f" of {one.name}" if one.name else ""
    where = "" if one.rank is None else f" on rank {one.rank}" + ("" if one.row is None else f", row {one.row}")
    value, expected = one.values
    size = "" if not math.isfinite(one.size) else f", relative difference {one.size:.1e}"
    values = "" if one.reason else f" is {value:.7g} for {expected:.7g}{size}"
    return f"step {one.step}, {one.place}{name}{where}{values}"


def _object(one: Difference) -> dict[str, Any]:
    value, expected = one.values
    return {
        "step": one.step, "pass": one.place, "name": one.name, "rank": one.rank, "row": one.row,
        "value": value, "expected": expected, "difference": one.size,
    }  # fmt: skip


def _curve(recording: Recording | None) -> dict[str, Any]:
    steps = sorted(recording.steps.items()) if recording else []
    files = sorted(recording.folder.iterdir()) if recording else []
    return {
        "losses": [step.loss for _, step in steps],
        "grad_norms": [step.grad_norm for _, step in steps],
        "digests": {file.name: file_digest(file) for file in files},
    }


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return encode_number(value) if isinstance(value, float) else value
