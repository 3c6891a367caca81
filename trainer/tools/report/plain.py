"""The curves of runs as text, for terminals and logs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import plotext

from trainer.base.text import one_line
from trainer.tools.report.runs import Run, best_metric, best_text

_HEIGHT = 15
_TICKS = 4
_Line = tuple[str | None, Sequence[tuple[int, float]]]  # label, and its steps and values
_LARGEST = 1e300  # the axis of larger values would end at infinity


def plain_lines(runs: Sequence[Run], width: int) -> Iterator[str]:
    """Yield the state of each run, then the curves of the loss and of the deciding metric."""
    for run in runs:
        step = f"step {run.last_step} of {run.info.get('total_steps', '?')}"
        yield f"{run.name}: {run.state}, {step}, best {best_text(run)}"
        if run.message:
            yield f"  {run.message.strip().splitlines()[0]}"
    losses = [(run.name, [(run.steps_before + one.step, one.loss) for one in run.metrics.steps]) for run in runs]
    yield from _curves("loss", losses, width)
    names = dict.fromkeys(best_metric(run) for run in runs if run.metrics.evaluations)
    for name in names:
        yield from _curves(f"validation {name}", [(run.name, run.evaluated(name)) for run in runs], width)


def _curves(title: str, found: Sequence[tuple[str, Sequence[tuple[int, float]]]], width: int) -> Iterator[str]:
    finite = [(name, [point for point in points if abs(point[1]) < _LARGEST]) for name, points in found]
    drawn = [(name, points) for name, points in finite if points]
    if not drawn:
        return
    first, last = min(points[0][0] for _, points in drawn), max(points[-1][0] for _, points in drawn)
    ticks = sorted({round(first + (last - first) * part / _TICKS) for part in range(_TICKS + 1)})
    labelled = [(one_line(name) if len(drawn) > 1 else None, points) for name, points in drawn]
    draw = _drawn if hasattr(plotext, "figure") else _drawn_by_5
    yield ""
    yield from draw(one_line(title), ticks, labelled, width).splitlines()


def _drawn(title: str, ticks: Sequence[int], lines: Sequence[_Line], width: int) -> str:
    figure = plotext.figure
    figure.clear()
    figure.theme("colorless").plot_size(width, _HEIGHT).title(title).label("step", axis="x")
    figure.ruler("x").ticks(ticks)
    for label, points in lines:
        steps, values = zip(*points, strict=True)
        signal = figure.signal(steps, values, marker=_marker(points)).lines()
        figure.draw(signal.label(label))
    return str(figure.build().string(colorless=True))


def _drawn_by_5(title: str, ticks: Sequence[int], lines: Sequence[_Line], width: int) -> str:
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plotsize(width, _HEIGHT)
    plotext.title(title)
    plotext.xlabel("step")
    plotext.xticks(ticks)
    for label, points in lines:
        steps, values = zip(*points, strict=True)
        plotext.plot(steps, values, label=label, marker=_marker(points))
    return str(plotext.uncolorize(plotext.build()))


def _marker(points: Sequence[tuple[int, float]]) -> str:
    return "braille" if len(points) > 1 else "dot"
