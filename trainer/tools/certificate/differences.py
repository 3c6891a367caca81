"""The differences of two recordings, and the first one that is beyond its tolerance.

The distance of two tensors is estimated from their projections. It is relative to the size of the reference: of an
output, the root mean square of its rows. A tensor that is small beside the largest one of its pass has the rounding of
the larger ones, so a hundredth of the largest size is the least.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from trainer.tools.certificate.recording import Call, Numbers, Output, Recording, Step, Whole
from trainer.tools.tolerances import difference, tolerance

Pass = Literal["weights", "forward", "loss", "backward", "sum over ranks", "norm", "update"]
PASSES: tuple[Pass, ...] = ("weights", "forward", "loss", "backward", "sum over ranks", "norm", "update")
_LEAST_SIZE = 1e-2
_ROUNDING = 1e-5
"""A gradient below this share of the norm is rounding, and so is the direction of its update."""


@dataclass(frozen=True)
class Limits:
    """The largest relative differences of two runs."""

    loss: float
    grad_norm: float
    tensor: float  # of outputs, their gradients, and gradients of parameters
    update: float

    def of(self, name: Pass) -> float:
        limits = {"loss": self.loss, "norm": self.grad_norm, "update": self.update}
        return limits.get(name, self.tensor)

    @classmethod
    def of_runs(cls, *runs: Recording) -> Limits:
        """Return the limits of the coarsest precision of some runs."""
        loss, norm = max(
            tolerance((run.header["precision"], run.header["sent_in"]), _pair(run.header.get("tolerances")))
            for run in runs
        )
        is_exact = all({run.header["precision"], run.header["sent_in"]} == {"fp32"} for run in runs)
        # In 16 bits a tensor has the rounding of many layers, of which the loss is a mean.
        return cls(loss, norm, norm / 2 if is_exact else 4 * norm, 0.02 if is_exact else 0.5)


def _pair(values: list[float] | None) -> tuple[float, float] | None:
    return (values[0], values[1]) if values else None


@dataclass(frozen=True)
class Difference:
    """The difference of one tensor, or of the loss or the norm."""

    step: int
    place: Pass
    name: str  # of the module or the parameter
    rank: int | None
    row: int | None  # of the global batch
    value: Numbers
    expected: Numbers
    size: float  # relative
    reason: str = ""  # a cause that the comparison itself knows

    @property
    def values(self) -> tuple[float, float]:
        """The norms of both tensors, or both numbers."""
        return _norm(self.value), _norm(self.expected)


@dataclass(frozen=True)
class Comparison:
    """The differences of two runs over the steps that both recorded."""

    limits: Limits
    steps: tuple[int, ...]
    largest: Mapping[Pass, Difference]  # of each pass, relative to its limit
    first: Difference | None  # the first one beyond its limit
    profile: tuple[Difference, ...]  # of each output of the step of `first`, or of the last step, in order
    not_compared: tuple[Pass, ...]  # passes that one of the runs did not record


def compare(run: Recording, reference: Recording) -> Comparison:
    """Compare a run with a reference."""
    limits = Limits.of_runs(run, reference)
    steps = tuple(sorted(run.steps.keys() & reference.steps.keys()))
    largest: dict[Pass, Difference] = {}
    first: Difference | None = None
    profile: tuple[Difference, ...] = ()
    found = list(_of_weights(run, reference)) if run.first == reference.first else []
    for step in (None, *steps):
        if step is not None:
            found = list(_of_step(step, run.steps[step], reference.steps[step]))
        for one in found:
            if one.place not in largest or not one.size <= largest[one.place].size:
                largest[one.place] = one
        if first is None:
            first = next((one for one in found if not one.size <= limits.of(one.place)), None)
            if step is not None:
                profile = tuple(one for one in found if one.place in ("forward", "backward"))
    lacking = tuple(place for place in PASSES if place not in largest)
    return Comparison(limits, steps, largest, first, profile, lacking)


def _of_weights(run: Recording, reference: Recording) -> Iterator[Difference]:
    yield from _of_parameters(run.first, "weights", run.weights, reference.weights)


def _of_step(step: int, own: Step, other: Step) -> Iterator[Difference]:
    """Yield the differences of a step in the order of its passes."""
    yield from _of_outputs(step, "forward", own.forward, other.forward)
    yield _of_number(step, "loss", own.loss, other.loss)
    yield from _of_outputs(step, "backward", own.backward, other.backward)
    yield from _of_parameters(step, "sum over ranks", own.gradients, other.gradients)
    yield _of_number(step, "norm", own.grad_norm, other.grad_norm)
    noise = _ROUNDING * other.grad_norm
    is_noise = {name for name, whole in other.gradients.items() if _norm(whole.numbers) <= noise}
    kept = {name: whole for name, whole in own.update.items() if name not in is_noise}
    yield from _of_parameters(step, "update", kept, other.update)


def _of_number(step: int, place: Pass, value: float, expected: float) -> Difference:
    return Difference(step, place, "", None, None, (1, value**2), (1, expected**2), difference(value, expected))


def _of_outputs(
    step: int, place: Pass, own: Mapping[Call, Output], other: Mapping[Call, Output]
) -> Iterator[Difference]:
    rows, expected_rows = _all_rows(own), _all_rows(other)
    if lacking := rows ^ expected_rows:
        row, name = min(lacking), next(iter(other), ("", 0))[0]
        reason = f"row {row} of the batch is " + ("missing" if row in expected_rows else "not in the reference")
        yield Difference(step, place, name, None, row, (0, 0), (0, 0), math.inf, reason)
        return
    sizes = {call: _rows_size(output) for call, output in other.items()}
    least = _LEAST_SIZE * max(sizes.values(), default=0.0)
    for call, expected in other.items():
        # An output that all rows share looks like that of a row in a microbatch of one.
        is_whole = call in own and own[call].rows.keys() == expected.rows.keys() == rows
        if is_whole and (found := _of_output(step, place, call, own[call], expected, max(sizes[call], least))):
            yield found


def _all_rows(outputs: Mapping[Call, Output]) -> set[int]:
    return {row for output in outputs.values() for row in output.rows}


def _rows_size(output: Output) -> float:
    squares = [numbers[1] for row in output.rows for _, numbers in output.of_row(row)[:1]]
    return math.sqrt(sum(squares) / len(squares)) if squares else 0.0


def _of_output(step: int, place: Pass, call: Call, own: Output, expected: Output, size: float) -> Difference | None:
    """Return the largest difference of the rows of an output; None if the outputs are not the same elements."""
    name = call[0] + (f" (call {call[1] + 1})" if call[1] else "")
    worst: Difference | None = None
    for row in sorted(expected.rows):
        _, reference = expected.of_row(row)[0]
        for rank, numbers in own.of_row(row):
            if numbers[0] != reference[0]:
                # A part of a layer that is cut over tensor ranks has other features, which is no fault.
                if own.width != expected.width:
                    return None
                tokens = [round(one[0] / expected.width) for one in (numbers, reference)]
                reason = f"another mask, or a row of another length: {tokens[0]} positions for {tokens[1]}"
                return Difference(step, place, name, rank, row, numbers, reference, math.inf, reason)
            apart = _ratio(distance(numbers, reference), size)
            found = Difference(step, place, name, rank, row, numbers, reference, apart)
            if worst is None or not found.size <= worst.size:
                worst = found
    return worst


def _of_parameters(
    step: int, place: Pass, own: Mapping[str, Whole], other: Mapping[str, Whole]
) -> Iterator[Difference]:
    expected = {name: whole.numbers for name, whole in other.items()}
    least = _LEAST_SIZE * max(map(_norm, expected.values()), default=0.0)
    for name, reference in expected.items():
        if name not in own:
            continue
        size = max(_norm(reference), least)
        yield max(
            (
                Difference(
                    step, place, name, rank, None, numbers, reference, _ratio(distance(numbers, reference), size)
                )
                for rank, numbers in own[name].copies()
            ),
            key=lambda one: math.inf if math.isnan(one.size) else one.size,
        )


def _norm(numbers: Numbers) -> float:
    return math.sqrt(numbers[1]) if numbers[1] >= 0 else math.nan


def distance(one: Numbers, other: Numbers) -> float:
    """Return an estimate of the distance of two tensors: that of their projections, or of their norms."""
    if not all(map(math.isfinite, (*one, *other))):
        return 0.0 if [*map(str, one)] == [*map(str, other)] else math.inf
    squares = [(a - b) ** 2 for a, b in zip(one[2:], other[2:], strict=True)]
    return max(math.sqrt(sum(squares) / max(1, len(squares))), abs(_norm(one) - _norm(other)))


def _ratio(distance: float, size: float) -> float:
    return distance / size if size else math.inf if distance else 0.0
