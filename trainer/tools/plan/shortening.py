"""Plans of deep models from two or three shallow ones, because a step is linear in the number of equal layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from torch import nn

from trainer.tools.plan.ledger import Peak, Place
from trainer.tools.plan.step_plan import StepPlan

FEWEST = 2
"""Layers of a shortened stack: the first and the last one. In another run, a third one stands for all between them."""

_MOST = 6  # layers of a stack that stays whole; runs with two and three layers would take about as long
_FIRST, _BETWEEN, _LAST = "<first>", "<between>", "<last>"
_POSITIONS = frozenset(("layer_idx", "layer_index", "layer_id", "layer_number", "idx"))


@dataclass(frozen=True)
class Stack:
    """Equal layers in a row: the name of the list that holds them, the index of the first one, and their number."""

    name: str
    first: int
    number: int


def stacks_of(model: Any, late: Collection[nn.Parameter] = ()) -> list[Stack]:
    """Return the stacks of a model that are worth shortening; `late` parameters have no update."""
    if len(set(getattr(model.config, "layer_types", None) or ())) > 1:
        return []  # layers of one class with different attention
    stacks = [
        Stack(name, *_longest_run(module, late))
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
    ]
    return [stack for stack in stacks if stack.number > _MOST]


def shorten(model: nn.Module, stacks: Iterable[Stack], longer: int | None) -> dict[nn.Module, str]:
    """Shorten stacks of a model, and return the names of its modules with the positions of layers in them.

    Stacks with `longer` layers keep a layer more.
    """
    names = {module: name for name, module in model.named_modules()}
    for stack in stacks:
        layers = model.get_submodule(stack.name)
        assert isinstance(layers, nn.ModuleList)
        # Stacks of equal depth are lengthened together; a plan for each depth gives its slope.
        kept = FEWEST + (stack.number == longer)
        # The last layer stays too, because other tensors are alive at the ends of a stack.
        del layers[stack.first + kept - 1 : stack.first + stack.number - 1]
        positions = [_FIRST, *[_BETWEEN] * (kept - FEWEST), _LAST]
        # The list may have other layers behind the stack, which keep their own names.
        for position, layer in zip(positions, list(layers)[stack.first :], strict=False):
            for name, module in layer.named_modules(prefix=f"{stack.name}.{position}"):
                names[module] = name
    return names


def lengthen(base: StepPlan, longer: Mapping[int, StepPlan], stacks: Sequence[Stack]) -> StepPlan:
    """Return the result for whole stacks.

    `base` has `FEWEST` layers in each stack; those in `longer` have a layer more in the stacks of that number.
    """
    totals, gradients, share = base.totals, base.gradients, base.share
    resident, held, host = Counter(base.resident), Counter(base.held), Counter(base.host)
    for number, found in longer.items():
        for sums, short, long in (
            (resident, base.resident, found.resident),
            (held, base.held, found.held),
            (host, base.host, found.host),
        ):
            for component, count in long.items():
                sums[component] += (number - FEWEST) * (count - short.get(component, 0))
        gradients += (number - FEWEST) * (found.gradients - base.gradients)
        share += (number - FEWEST) * (found.share - base.share)
        # base + (number - FEWEST) * (found - base).
        totals = totals.plus(found.totals, number - FEWEST).plus(base.totals, FEWEST - number)
    # The sign `+` of a `Counter` drops the components without bytes.
    return replace(
        base, resident=+resident, held=+held, host=+host, peaks=_peaks(base, longer, stacks), gradients=gradients,
        totals=totals, share=share,
    )  # fmt: skip


def _peaks(base: StepPlan, longer: Mapping[int, StepPlan], stacks: Sequence[Stack]) -> dict[Place, Peak]:
    """Return the peaks for whole stacks; see `lengthen`."""
    peaks: dict[Place, Peak] = {}
    for number, found in longer.items():
        for place, peak in found.peaks.items():
            ends = [_at(place, _FIRST), _at(place, _LAST)] if _BETWEEN in place.module else [place]
            # Bytes alive between two layers change linearly, so that the most are at one of the ends.
            slopes = [_slopes(base, longer, end) for end in ends if end in base.peaks]
            if not slopes:
                continue
            slope = max(slopes, key=lambda found: sum((n - FEWEST) * found[n].total() for n in longer))
            by_component = Counter(peak.by_component)
            for other, change in slope.items():
                missing = other - FEWEST - (other == number)  # `found` has one more of its own stacks already
                for component, count in change.items():
                    by_component[component] += missing * count
            whole = {component: count for component, count in by_component.items() if count > 0}
            named = place._replace(module=_indexed(place.module, stacks))
            if named not in peaks or peaks[named].num_bytes < sum(whole.values()):
                peaks[named] = Peak(sum(whole.values()), whole, named)
    return peaks


def _slopes(base: StepPlan, longer: Mapping[int, StepPlan], place: Place) -> dict[int, Counter[str]]:
    """Return the bytes that a layer more adds at a place, by component, for the stacks of each number of layers."""
    slopes = {}
    for number, found in longer.items():
        slopes[number] = Counter(found.peaks[place].by_component if place in found.peaks else {})
        slopes[number].subtract(base.peaks[place].by_component if place in found.peaks else {})
    return slopes


def _at(place: Place, position: str) -> Place:
    return place._replace(module=place.module.replace(_BETWEEN, position))


def _indexed(module: str, stacks: Iterable[Stack]) -> str:
    """Return the name of a module with the index of its layer; the second layer stands for all between the ends."""
    for stack in stacks:
        for position, index in ((_FIRST, 0), (_BETWEEN, 1), (_LAST, stack.number - 1)):
            module = module.replace(f"{stack.name}.{position}", f"{stack.name}.{stack.first + index}")
    return module


def _longest_run(layers: nn.ModuleList, late: Collection[nn.Parameter]) -> tuple[int, int]:
    """Return the index of the first of the most equal layers in a row that have parameters, and their number."""
    runs, begun = [(0, 0)], 0
    for mark, group in groupby(_description(layer, late) for layer in layers):
        length = len(list(group))
        if mark:
            runs.append((begun, length))
        begun += length
    return max(runs, key=lambda run: run[1])


def _description(layer: nn.Module, late: Collection[nn.Parameter]) -> list[Any]:
    """Return the classes, shapes and settings of a layer, without its position; an empty list without parameters."""
    shapes = [(name, tuple(p.shape), p.requires_grad, p in late) for name, p in layer.named_parameters()]
    settings = [
        (name, type(module), key, value)
        for name, module in layer.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, int | float | str | tuple) and key not in _POSITIONS
    ]
    # Layers are equal for a plan if all that decides shapes and operations is equal, but not their values.
    return [*shapes, *settings] if shapes else []
