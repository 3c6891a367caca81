"""The likely cause of a first difference: a table of tests, of which the first that holds decides."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trainer.base.text import dotted_leaves, listed
from trainer.tools.certificate.differences import Comparison, Difference, distance
from trainer.tools.certificate.recording import Numbers, Output, Recording

_EQUAL = 1e-3
"""The relative distance of two tensors that are multiples of each other, up to rounding."""
_NARROW = 5e-3  # errors of products with 10 or more bits of mantissa are below it
_GROWN = 0.1  # of the limit, at the modules before
_SHOWN = 3


@dataclass(frozen=True)
class Finding:
    """A first difference with both runs."""

    one: Difference
    run: Recording
    reference: Recording
    comparison: Comparison

    @property
    def kind(self) -> str:
        """The class of the module, in small letters."""
        return self.run.modules.get(self.module, "").lower()

    @property
    def module(self) -> str:
        return self.one.name.partition(" (call")[0]

    @property
    def factor(self) -> float | None:
        """The factor between the tensor and that of the reference; None if they are no multiples."""
        if self.one.place in ("loss", "norm"):
            value, expected = self.one.values
            return value / expected if expected else None
        return factor(self.one.value, self.one.expected)

    def outputs(self) -> tuple[Output, Output] | None:
        """Return the output that differs, of both runs."""
        name, _, call = self.one.name.removesuffix(")").partition(" (call ")
        key = name, int(call or 1) - 1
        own, other = (run.steps[self.one.step] for run in (self.run, self.reference))
        parts = (own.forward, other.forward) if self.one.place == "forward" else (own.backward, other.backward)
        found = parts[0].get(key), parts[1].get(key)
        return (found[0], found[1]) if found[0] and found[1] else None

    def before(self) -> Sequence[Difference]:
        """Return the differences of the outputs before this one, in its pass."""
        same = [one for one in self.comparison.profile if one.place == self.one.place]
        return same[: same.index(self.one)] if self.one in same else same


def factor(value: Numbers, expected: Numbers) -> float | None:
    """Return the factor between two tensors; None if they are no multiples of each other."""
    square = sum(number**2 for number in expected[2:])
    product = sum(one * other for one, other in zip(value[2:], expected[2:], strict=True))
    if not (square and math.isfinite(square) and math.isfinite(product)):
        return None
    found = product / square
    scaled = (expected[0], found**2 * expected[1], *(found * number for number in expected[2:]))
    size = math.sqrt(expected[1])
    return found if found and size and distance(value, scaled) <= _EQUAL * abs(found) * size else None


def likely(finding: Finding) -> str:
    """Return the likely cause of a first difference in one line."""
    if finding.one.reason:
        return _order(finding) or finding.one.reason
    text = next((text for row in _CAUSES if (text := row(finding))), "unknown: no row of the table of causes fits")
    return text + _of_one_rank(finding)


def _other_training(found: Finding) -> str:
    own, other = (dotted_leaves(run.header["identity"]) for run in (found.run, found.reference))
    keys = sorted(key for key in own.keys() | other.keys() if own.get(key) != other.get(key))
    return f"the recipes differ in {listed(keys, _SHOWN)}" if keys else ""


def _weights(found: Finding) -> str:
    if found.one.place != "weights":
        return ""
    return "a weight is read or drawn in another way" + _times(found)


def _order(found: Finding) -> str:
    """Test whether rows have the values of other rows."""
    if found.one.place != "forward" or (outputs := found.outputs()) is None:
        return ""
    own, other = outputs
    expected = {row: other.of_row(row)[0][1] for row in other.rows}
    moved = []
    for row in own.rows:
        value = own.of_row(row)[0][1]
        size = math.sqrt(value[1]) or 1.0
        apart = {place: distance(value, numbers) / size for place, numbers in expected.items()}
        nearest = min(apart, key=lambda place: apart[place])
        if nearest != row and apart[nearest] <= found.comparison.limits.tensor < apart[row]:
            moved.append(f"row {row} has the values of row {nearest}")
    return f"another order of rows: {listed(moved, _SHOWN, '; ')}" if moved else ""


def _grown(found: Finding) -> str:
    before = [one.size for one in found.before()]
    is_growing = bool(before) and max(before) >= _GROWN * found.comparison.limits.tensor
    return "rounding of kernels that grows with the depth" if is_growing and found.one.size < _NARROW else ""


def _adapter(found: Finding) -> str:
    is_adapted = any(name.startswith(f"{found.module}.lora") for name in found.run.modules)
    if found.one.place == "forward" and is_adapted:
        return "another scale or weight of an adapter"
    if found.one.place == "sum over ranks" and ".lora." in found.one.name and found.factor is not None:
        return "another scale of an adapter, or a gradient that is summed twice or not at all" + _times(found)
    return ""


def _products(found: Finding) -> str:
    is_product = any(word in found.kind for word in ("linear", "conv", "dense"))
    if found.one.place in ("forward", "backward") and is_product and found.one.size < _NARROW:
        return "products in TF32, or in another type of 16 bits"
    return ""


def _norm(found: Finding) -> str:
    if found.one.place != "forward" or "norm" not in found.kind:
        return ""
    if found.one.size < _NARROW:
        return "another epsilon of the normalisation, or its rounding to 16 bits"
    return "another input of the normalisation, such as a skipped residual, or another epsilon"


def _attention(found: Finding) -> str:
    is_attention = found.one.place == "forward" and "attention" in f"{found.kind} {found.module.lower()}"
    return "another attention mask, or another order of positions" if is_attention else ""


def _embedding(found: Finding) -> str:
    if found.one.place != "forward" or "embed" not in f"{found.kind} {found.module.lower()}":
        return ""
    return "other inputs: tokens, positions, or a stale buffer or weight of the embeddings"


def _experts(found: Finding) -> str:
    if found.one.place not in ("forward", "backward") or "expert" not in f"{found.kind} {found.module.lower()}":
        return ""
    return "experts that are left out or exchanged, or tokens that went to another expert" + _times(found)


def _forward(found: Finding) -> str:
    if found.one.place != "forward":
        return ""
    return "another operation in this module, such as a skipped residual, or a stale weight or buffer" + _times(found)


def _loss(found: Finding) -> str:
    return (
        "another denominator, or other labels or weights of the loss" + _times(found)
        if found.one.place == "loss"
        else ""
    )


def _backward(found: Finding) -> str:
    if found.one.place != "backward":
        return ""
    if found.factor is not None:
        return "another denominator or scale of the loss, or a gradient that is summed twice" + _times(found)
    return "a gradient of an output that is not summed over the ranks that use it, or a wrong backward pass"


def _sum(found: Finding) -> str:
    if found.one.place != "sum over ranks":
        return ""
    times = found.factor
    if times is None:
        return "a part of the gradient is missing in the sum over ranks, or is counted twice"
    is_less = abs(times) < 1
    return ("a gradient that is not summed over ranks" if is_less else "a gradient that is summed twice") + _times(
        found
    )


def _global_norm(found: Finding) -> str:
    if found.one.place != "norm":
        return ""
    return "the norm leaves out a part of the gradients, or counts it twice" + _times(found)


def _update(found: Finding) -> str:
    if found.one.place != "update":
        return ""
    if found.factor is not None:
        return "another learning rate, or an update that is applied twice" + _times(found)
    return "another constant or state of the optimizer, such as epsilon or weight decay"


def _times(found: Finding) -> str:
    return "" if found.factor is None else f" (it is {found.factor:.4g} times that of the reference)"


def _of_one_rank(found: Finding) -> str:
    """Name the only rank of several copies that differs."""
    one = found.one
    if one.rank is None:
        return ""
    copies: Mapping[int, Numbers]
    if one.row is not None:
        outputs = found.outputs()
        copies = dict(outputs[0].of_row(one.row)) if outputs else {}
    else:
        step = found.run.steps.get(one.step)
        sources = {"weights": found.run.weights} | (
            {"sum over ranks": step.gradients, "update": step.update} if step else {}
        )
        copies = dict(sources[one.place][one.name].copies())
    size = math.sqrt(one.expected[1]) or 1.0
    equal = [
        rank for rank, value in copies.items() if distance(value, one.expected) <= found.comparison.limits.tensor * size
    ]
    return f", on rank {one.rank}; the copy of rank {equal[0]} agrees" if equal else ""


_CAUSES: Sequence[Callable[[Finding], str]] = (
    _other_training, _weights, _order, _grown, _adapter, _products, _norm, _attention, _embedding, _experts, _forward,
    _loss, _backward, _sum, _global_norm, _update,
)  # fmt: skip
