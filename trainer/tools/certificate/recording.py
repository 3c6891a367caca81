"""The fingerprints of a run, which `logging.fingerprints` writes: those of all ranks, by step and tensor."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.base.errors import UsageError

FOLDER = "fingerprints"
_FORMAT, _FILES, _NUMBERS = 1, "rank-*.jsonl", 6

Numbers = tuple[float, ...]
"""The number of elements, the sum of squares, and the projections of a tensor."""

Call = tuple[str, int]
"""A module, and the number of its earlier calls in the pass."""


@dataclass
class Output:
    """An output of a module, or its gradient: the numbers of each row, by the rank."""

    width: int
    is_shared: bool  # whether each rank has other elements
    rows: dict[int, dict[int, Numbers]] = field(default_factory=dict)

    def of_row(self, row: int) -> list[tuple[int, Numbers]]:
        """Return rank and numbers of each whole copy of a row."""
        by_rank = self.rows[row]
        if not self.is_shared:
            return sorted(by_rank.items())
        return [(min(by_rank), _sum(list(by_rank.values())))]


@dataclass
class Whole:
    """A parameter, its gradient or its change: the numbers of each part, by the rank."""

    parts: dict[str, dict[int, Numbers]] = field(default_factory=lambda: defaultdict(dict))

    @property
    def numbers(self) -> Numbers:
        """The numbers of the whole tensor, from the first copy of each part."""
        return _sum([by_rank[min(by_rank)] for by_rank in self.parts.values()])

    def copies(self) -> Iterator[tuple[int, Numbers]]:
        """Yield rank and numbers of the whole tensor with the copies of each further rank in place of the first."""
        yield min(rank for by_rank in self.parts.values() for rank in by_rank), self.numbers
        for place, by_rank in self.parts.items():
            others = [own[min(own)] for name, own in self.parts.items() if name != place]
            for rank in sorted(by_rank)[1:]:
                yield rank, _sum([*others, by_rank[rank]])


@dataclass
class Step:
    """The fingerprints of a step; outputs are in the order of their execution."""

    loss: float
    grad_norm: float
    forward: dict[Call, Output] = field(default_factory=dict)
    backward: dict[Call, Output] = field(default_factory=dict)
    gradients: dict[str, Whole] = field(default_factory=lambda: defaultdict(Whole))
    update: dict[str, Whole] = field(default_factory=lambda: defaultdict(Whole))


@dataclass
class Recording:
    """The fingerprints of a run."""

    folder: Path
    header: Mapping[str, Any]  # of rank 0
    modules: dict[str, str]  # the class of each module
    weights: dict[str, Whole]  # before the first step that is recorded
    first: int  # the number of steps before it
    steps: dict[int, Step]
    notes: list[str]


def read_recording(run: Path) -> Recording:
    """Return the fingerprints in the folder of a run.

    Raises:
        UsageError: there are none, a rank is missing, or a file is damaged.
    """
    folder = run / FOLDER
    files = sorted(folder.glob(_FILES))
    if not files:
        raise UsageError(f"{run} must hold fingerprints, but does not; train it with logging.fingerprints=true")
    ranks = [_lines(file) for file in files]
    headers = [lines[0] for lines in ranks]
    if len(files) != headers[0]["world_size"] or any(one["world_size"] != len(files) for one in headers):
        number = headers[0]["world_size"]
        raise UsageError(
            f"{folder} must hold the fingerprints of {number} ranks, but holds {len(files)} files; remove the folder,"
            " and train again"
        )
    # Stages in the order of the model.
    ranks.sort(key=lambda lines: (lines[0]["axes"]["pp"][0], lines[0]["rank"]))
    common = set.intersection(*({line["step"] for line in lines[2:]} for lines in ranks))
    notes = []
    if any(line["step"] not in common for lines in ranks for line in lines[2:]):
        notes.append(f"{run} ended within a step, which is left out")
    found = Recording(folder, next(one for one in headers if one["rank"] == 0), {}, {}, ranks[0][1]["step"], {}, notes)
    weights: dict[str, Whole] = defaultdict(Whole)
    try:
        for lines in ranks:
            header, begin, *steps = lines
            found.modules.update(header["modules"])
            _add_whole(weights, begin["weights"], header["rank"])
            for line in steps:
                if line["step"] in common:
                    _add_step(found.steps, line, header["rank"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(folder, f"{type(error).__name__}: {error}") from error
    found.weights = weights
    return found


def _lines(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a file; a last line without an end was cut off when the run was killed."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _damaged(file, str(error)) from error
    *whole, _ = text.split("\n")
    lines = []
    for number, line in enumerate(whole, start=1):
        try:
            lines.append(json.loads(line))
        except ValueError as error:
            raise _damaged(file, f"line {number}: {error}") from error
    is_good = len(lines) > 1 and all(isinstance(line, dict) for line in lines)
    if not is_good or lines[0].get("fingerprints") != _FORMAT or "weights" not in lines[1]:
        raise _damaged(file, "it has no header of this version, or no weights")
    if not all(isinstance(line.get("step"), int) for line in lines[1:]):
        raise _damaged(file, "a line has no step")
    return lines


def _damaged(place: Path, problem: str) -> UsageError:
    return UsageError(f"{place} must hold fingerprints of this version, but is damaged ({problem}); record it again")


def _add_step(steps: dict[int, Step], line: Mapping[str, Any], rank: int) -> None:
    step = steps.setdefault(line["step"], Step(float(line["loss"]), float(line["grad_norm"])))
    for outputs, records in ((step.forward, line["forward"]), (step.backward, line["backward"])):
        for name, call, width, is_shared, rows in records:
            output = outputs.setdefault((name, call), Output(width, is_shared))
            for row, numbers in rows.items():
                output.rows.setdefault(int(row), {})[rank] = _numbers(numbers)
    _add_whole(step.gradients, line["gradients"], rank)
    _add_whole(step.update, line["update"], rank)


def _add_whole(found: dict[str, Whole], entries: Sequence[Any], rank: int) -> None:
    for name, place, numbers in entries:
        found[name].parts[place][rank] = _numbers(numbers)


def _numbers(values: Sequence[Any]) -> Numbers:
    if len(values) != _NUMBERS:
        raise ValueError(f"a tensor has {_NUMBERS} numbers, not {len(values)}")
    return tuple(map(float, values))


def _sum(parts: Sequence[Numbers]) -> Numbers:
    return tuple(
        math.fsum(values) if all(map(math.isfinite, values)) else math.nan for values in zip(*parts, strict=True)
    )
