"""The page of a certificate: the verdicts, the differences by depth, and the facts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from trainer.tools.certificate.differences import PASSES, Comparison, Pass
from trainer.tools.certificate.result import Certificate, LayoutResult
from trainer.tools.report.figures import Curve, curves
from trainer.tools.report.page import Section, Table, render
from trainer.tools.tolerances import difference

_EQUAL = 1e-9
"""The place of equal values on a logarithmic axis."""


def page(certificate: Certificate) -> str:
    """Return the page of a certificate."""
    results = certificate.results
    compared = [(one, one.comparison) for one in results if one.comparison is not None]
    verdict = "All layouts train the same, within the tolerances." if certificate.is_equal else "Layouts differ."
    names = [[one.name, str(one.processes), one.sentence()] for one in results]
    sections = [Section("Verdict", [verdict, Table(("", "ranks", "result"), names), *certificate.notes])]
    if compared:
        sections.append(Section("Largest relative differences", [_largest(compared)]))
        sections.append(Section("Differences by depth", list(_by_depth(compared))))
    sections.append(Section("Losses", list(_losses(results))))
    facts = certificate.as_object()
    shown = [(key, _text(facts[key])) for key in (*certificate.facts, "hash") if facts[key]]
    sections.append(Section("Facts", [Table(("", ""), shown)]))
    return render(f"Certificate of {certificate.facts['recipe']}", sections)


def _largest(compared: Sequence[tuple[LayoutResult, Comparison]]) -> Table:
    def cell(found: Comparison, place: Pass) -> str:
        one = found.largest.get(place)
        return "not recorded" if one is None else f"{one.size:.1e}"

    limits = compared[0][1].limits
    rows = [["tolerance", *(f"{limits.of(place):.1e}" for place in PASSES)]]
    rows += [[one.name, *(cell(found, place) for place in PASSES)] for one, found in compared]
    return Table(("", *PASSES), rows)


def _by_depth(compared: Sequence[tuple[LayoutResult, Comparison]]) -> Iterator[go.Figure]:
    """Yield the differences of the outputs, and of their gradients, in the order of execution."""
    places: tuple[Pass, Pass] = ("forward", "backward")
    for place in places:
        found = []
        for one, comparison in compared:
            sizes = [max(_EQUAL, other.size) for other in comparison.profile if other.place == place]
            found.append(Curve(one.name, list(range(1, len(sizes) + 1)), sizes))
        if any(curve.steps for curve in found):
            figure = curves(f"{place}, relative difference of each output, in order", found, is_log=True)
            figure.update_xaxes(title_text="output")
            yield figure


def _losses(results: Sequence[LayoutResult]) -> Iterator[go.Figure]:
    steps = [(one.name, one.recording.steps) for one in results if one.recording is not None]
    yield curves("loss", [Curve(name, sorted(own), [own[step].loss for step in sorted(own)]) for name, own in steps])
    _, first = steps[0]
    apart = []
    for name, own in steps[1:]:
        both = sorted(own.keys() & first.keys())
        apart.append(Curve(name, both, [max(_EQUAL, difference(own[one].loss, first[one].loss)) for one in both]))
    if apart:
        yield curves(f"relative difference of the loss; {_EQUAL:g} if equal", apart, is_log=True)


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_text(one)}" for name, one in value.items())
    return "; ".join(map(_text, value)) if isinstance(value, list) else str(value)
