"""Figures of runs: curves over the steps, with marks, and memory by rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import plotly.graph_objects as go

from trainer.engine.timeline import ACTION_COLOURS, ACTION_NAMES, Timeline
from trainer.reporting.page import label

COLOURS = ("#3b7dd8", "#d8662a", "#2f9e6e", "#b5488f", "#8f7a1e", "#6a5fc1", "#c23b4b", "#2b97a6")
_SMOOTHING = 0.9  # the weight of the past in the moving average
_HEIGHT = 340


@dataclass(frozen=True)
class Mark:
    """Steps of one kind that are marked on a curve."""

    name: str
    steps: Sequence[int]
    symbol: str  # of Plotly


@dataclass(frozen=True)
class Curve:
    """The values of one run over its steps; non-finite values are gaps."""

    run: str
    steps: Sequence[int]
    values: Sequence[float]
    marks: Sequence[Mark] = field(default=())


def curves(title: str, found: Sequence[Curve], unit: str = "", smooths: bool = False) -> go.Figure:
    """Draw the curves of several runs, a colour each, with buttons for a logarithmic axis and for a moving average.

    Args:
        title: the quantity.
        found: a curve for each run, in the order of their colours.
        unit: the unit of the values.
        smooths: whether the curve is noisy enough for a moving average.
    """
    figure = go.Figure()
    is_smooth: list[bool | None] = []  # None: always visible
    for number, curve in enumerate(found):
        colour = COLOURS[number % len(COLOURS)]
        values = [value if math.isfinite(value) else None for value in curve.values]
        mode = "lines+markers" if len(values) <= 30 else "lines"
        common = {"x": list(curve.steps), "legendgroup": str(number), "name": label(curve.run), "mode": mode}
        line = {"color": colour, "width": 2}
        figure.add_scatter(**common, y=values, line=line)
        is_smooth.append(False if smooths else None)
        if smooths:
            smooth = list(_smoothed(curve.values))
            figure.add_scatter(**common, y=smooth, line=line, visible=False)
            is_smooth.append(True)
        at = dict(zip(curve.steps, values, strict=True))
        for mark in curve.marks:
            steps = mark.steps if curve.steps else ()
            figure.add_scatter(
                x=list(steps),
                y=[at[_logged(step, curve.steps)] for step in steps],
                mode="markers",
                name=label(mark.name),
                legendgroup=str(number),
                showlegend=len(steps) > 0,
                marker={"symbol": mark.symbol, "size": 10, "color": colour, "line": {"width": 1}},
            )
            is_smooth.append(None)
    _lay_out(figure, title, "step", unit)
    figure.update_layout(updatemenus=_menus(is_smooth if smooths else []))
    return figure


def bars(title: str, groups: Sequence[str], found: Sequence[tuple[str, Sequence[float]]], unit: str) -> go.Figure:
    """Draw groups of bars, a colour for each name.

    Args:
        title: the quantity.
        groups: the names of the groups.
        found: a name, and its value in each group; values of the last groups may be missing.
        unit: the unit of the values.
    """
    figure = go.Figure()
    for number, (name, values) in enumerate(found):
        colour = COLOURS[number % len(COLOURS)]
        labels = [label(group) for group in groups]
        figure.add_bar(x=labels, y=list(values), name=label(name), marker_color=colour, showlegend=True)
    _lay_out(figure, title, "", unit)
    return figure


def ranges(title: str, found: Sequence[tuple[str, tuple[float, float, float]]], unit: str) -> go.Figure:
    """Draw a bar for each name, with a line from the first to the last of its quartiles; the first name is on top."""
    figure = go.Figure()
    middle = [values[1] for _, values in found]
    figure.add_bar(
        y=[label(name) for name, _ in found],
        x=middle,
        orientation="h",
        marker_color=COLOURS[0],
        error_x={
            "array": [high - value for (_, (_, _, high)), value in zip(found, middle, strict=True)],
            "arrayminus": [value - low for (_, (low, _, _)), value in zip(found, middle, strict=True)],
            "color": COLOURS[1],
        },
    )
    _lay_out(figure, title, unit, "")
    figure.update_layout(hovermode="closest", height=_HEIGHT + 22 * max(0, len(found) - 8))
    figure.update_yaxes(autorange="reversed", automargin=True)
    return figure


def confusion(title: str, classes: Sequence[str], counts: Sequence[Sequence[int]]) -> go.Figure:
    """Draw a matrix of rows: a line for each true class, a column for each predicted one.

    Args:
        title: the quantity.
        classes: the names of the classes.
        counts: the rows of each true class by their predicted class.
    """
    names = [label(name) for name in classes]
    shares = [[count / max(1, sum(row)) for count in row] for row in counts]
    cells = "%{y}: %{text} rows predicted as %{x}<extra></extra>"
    figure = go.Figure(
        go.Heatmap(
            x=names,
            y=names,
            z=shares,
            text=[list(map(str, row)) for row in counts],
            texttemplate="%{text}" if len(names) <= 15 else "",
            hovertemplate=cells,
            colorscale="Blues",
            zmin=0,
            zmax=1,
            showscale=False,
        )
    )
    _lay_out(figure, title, "predicted", "")
    figure.update_layout(hovermode="closest", height=_HEIGHT + 18 * max(0, len(names) - 8))
    figure.update_xaxes(type="category", automargin=True)
    figure.update_yaxes(type="category", autorange="reversed", automargin=True)
    return figure


def timeline(title: str, found: Timeline) -> go.Figure:
    """Draw one pass through a pipeline: a row for each rank, a box for each action; gaps are idle."""
    figure = go.Figure()
    for kind, name in ACTION_NAMES.items():
        spans = [(rank, span) for rank, row in enumerate(found.ranks) for span in row if span.action.kind == kind]
        if spans:
            figure.add_bar(
                orientation="h",
                name=name,
                y=[f"rank {rank}" for rank, _ in spans],
                base=[span.start for _, span in spans],
                x=[span.end - span.start for _, span in spans],
                text=[str(span.action.microbatch) for _, span in spans],
                customdata=[span.action.stage for _, span in spans],
                hovertemplate="microbatch %{text}, stage %{customdata}<extra>" + name + "</extra>",
                marker={"color": ACTION_COLOURS[kind], "line": {"width": 1, "color": "white"}},
                textposition="inside",
            )
    _lay_out(figure, title, "forward passes of one microbatch", "")
    figure.update_layout(barmode="overlay", hovermode="closest", height=240 + 34 * len(found.ranks))
    figure.update_yaxes(type="category", autorange="reversed", automargin=True)
    return figure


def _logged(step: int, steps: Sequence[int]) -> int:
    """Return the first logged step at or after `step`, or the last one."""
    return next((one for one in steps if one >= step), steps[-1])


def _smoothed(values: Iterable[float]) -> Iterable[float | None]:
    """Yield the exponential moving average, without its bias to zero (Kingma and Ba 2015, arXiv:1412.6980)."""
    mean = weight = 0.0
    for value in values:
        if not math.isfinite(value):
            yield None
            continue
        mean = _SMOOTHING * mean + (1 - _SMOOTHING) * value
        weight = _SMOOTHING * weight + 1 - _SMOOTHING
        yield mean / weight


def _lay_out(figure: go.Figure, title: str, x_title: str, unit: str) -> None:
    clear = "rgba(0,0,0,0)"
    figure.update_layout(
        title={"text": label(title), "x": 0.01, "font": {"size": 15}},
        height=_HEIGHT,
        margin={"l": 60, "r": 12, "t": 76, "b": 56},
        paper_bgcolor=clear,
        plot_bgcolor=clear,
        hovermode="x unified",
        legend={"orientation": "h", "y": -0.3},
        xaxis_title=x_title,
        yaxis_title=unit,
        font={"color": "#6e7781"},
        template="none",
        modebar={"bgcolor": clear, "color": "#8a939c", "activecolor": "#3b7dd8", "remove": ["select2d", "lasso2d"]},
    )
    figure.update_xaxes(gridcolor="rgba(128,128,128,.25)")
    figure.update_yaxes(gridcolor="rgba(128,128,128,.25)")


def _menus(is_smooth: Sequence[bool | None]) -> list[dict[str, object]]:
    def menu(side: str, *buttons: dict[str, object]) -> dict[str, object]:
        x = 0.0 if side == "left" else 1.0
        return {
            "type": "buttons", "direction": "left", "x": x, "xanchor": side, "y": 1.0, "yanchor": "bottom",
            "buttons": list(buttons), "showactive": True, "font": {"size": 11, "color": "#6e7781"},
            "pad": {"t": 0, "b": 4}, "bgcolor": "rgba(128,128,128,.12)", "borderwidth": 0,
        }  # fmt: skip

    def axis(kind: str) -> dict[str, object]:
        return {"label": kind, "method": "relayout", "args": [{"yaxis.type": kind}]}

    def shown(smooth: bool) -> dict[str, object]:
        visible = [one is None or one == smooth for one in is_smooth]
        return {"label": "smooth" if smooth else "raw", "method": "restyle", "args": [{"visible": visible}]}

    menus = [menu("right", axis("linear"), axis("log"))]
    if is_smooth:
        menus.append(menu("left", shown(False), shown(True)))
    return menus
