"""Figures of runs: curves over the steps, with marks, and memory by rank."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import plotly.graph_objects as go

from trainer.tools.report.page import label
from trainer.tools.report.timeline import ACTION_COLOURS, ACTION_NAMES, Timeline

COLOURS = ("#3b7dd8", "#d8662a", "#2f9e6e", "#b5488f", "#8f7a1e", "#6a5fc1", "#c23b4b", "#2b97a6")
_DASHES = ("solid", "dash", "dot", "dashdot")  # of curves beyond the colours
_SMOOTHING = 0.9  # the weight of the past in the moving average
_HEIGHT = 280
_LEAST_HEIGHT = 150
_FAR_LONGER = 3.0  # times the second longest bar
_BAR = 24  # pixels of a bar and its gap
_LETTER = 7  # pixels of a letter
_ACROSS = 50  # letters of all names below a figure that stand beside each other
_LABEL = 18  # characters of a line of a bar's name


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

    @property
    def drawn(self) -> list[float | None]:
        """The values, with None for a gap."""
        return [value if math.isfinite(value) else None for value in self.values]


def curves(
    title: str,
    found: Sequence[Curve],
    unit: str = "",
    smooths: bool = False,
    from_zero: bool = False,
    is_log: bool = False,
) -> go.Figure:
    """Draw the curves of several runs, a colour each, with buttons for a logarithmic axis and for a moving average.

    Args:
        smooths: whether the curve is noisy enough for a moving average.
        from_zero: whether the axis starts at zero.
        is_log: whether the axis is always logarithmic.
    """
    figure = go.Figure()
    named: set[str] = set()
    for number, curve in enumerate(found):
        colour = COLOURS[number % len(COLOURS)]
        values = curve.drawn
        mode = "lines+markers" if len(values) <= 30 else "lines"
        common = {"x": list(curve.steps), "legendgroup": str(number), "mode": mode, "marker": {"size": 5}}
        line = {"color": colour, "width": 2, "dash": _DASHES[number // len(COLOURS) % len(_DASHES)]}
        is_named = len(found) > 1
        name = label(curve.run)
        figure.add_scatter(
            **common, y=values, line=line, name=name, showlegend=is_named, meta="raw" if smooths else None
        )
        if smooths:
            smooth = list(_smoothed(curve.values))
            name += ", smooth"
            figure.add_scatter(**common, y=smooth, line=line, name=name, meta="smooth", visible=False, showlegend=False)
        at = dict(zip(curve.steps, values, strict=True))
        for mark in curve.marks:
            steps = mark.steps if curve.steps else ()
            # Not all steps are logged, so a mark has the height of the next logged one.
            logged = [next((one for one in curve.steps if one >= step), curve.steps[-1]) for step in steps]
            figure.add_scatter(
                x=list(steps),
                y=list(map(at.__getitem__, logged)),
                mode="markers",
                name=label(mark.name),
                legendgroup=str(number),
                showlegend=len(steps) > 0 and mark.name not in named,
                marker={"symbol": mark.symbol, "size": 10, "color": colour, "line": {"width": 1}},
            )
            named |= {mark.name} if steps else set()
    _lay_out(figure, title, "step", unit, ["log"] * (not is_log) + ["smooth"] * smooths)
    if is_log:
        figure.update_yaxes(type="log", exponentformat="power")
    if from_zero:
        figure.update_yaxes(rangemode="tozero")
    return figure


def bars(
    title: str, groups: Sequence[str], found: Sequence[tuple[str, Sequence[float]]], unit: str, is_stacked: bool = False
) -> go.Figure:
    """Draw groups of horizontal bars, a colour for each name; the first group is on top.

    Args:
        found: a name, and its value in each group; values of the last groups may be missing.
        is_stacked: whether the bars of a group are one bar of several parts.
    """
    figure = go.Figure()
    labels = list(map(_folded, groups))
    for number, (name, values) in enumerate(found):
        colour = COLOURS[number % len(COLOURS)]
        figure.add_bar(
            y=labels, x=list(values), orientation="h", name=label(name), marker_color=colour, showlegend=len(found) > 1
        )
    _lay_out_bars(figure, title, len(groups) * (1 if is_stacked or len(found) == 1 else 1.4), unit)
    figure.update_layout(barmode="stack" if is_stacked else "group", legend_traceorder="normal")
    return figure


def ranges(title: str, found: Sequence[tuple[str, Sequence[float]]], unit: str) -> go.Figure:
    """Draw a bar for each name, with a line from the first to the last of its quartiles; the first name is on top.

    A bar that is far longer than all others leaves the figure, with its value as text, so that the others show.
    """
    middle = [values[1] for _, values in found]
    figure = bars(title, [name for name, _ in found], [("median", middle)], unit)
    figure.data[0].error_x = {
        "array": [high - value for (_, (_, _, high)), value in zip(found, middle, strict=True)],
        "arrayminus": [value - low for (_, (low, _, _)), value in zip(found, middle, strict=True)],
        "color": COLOURS[1],
    }
    *_, second, longest = sorted([0.0, *(high for _, (_, _, high) in found)])
    if longest > _FAR_LONGER * second > 0:
        figure.update_xaxes(range=[0, 1.5 * second])
        figure.data[0].text = [f"{value:,.4g}" if value > 1.5 * second else "" for value in middle]
        figure.update_traces(textposition="inside", insidetextanchor="start", textangle=0)
    return figure


def ranks(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> go.Figure:
    """Draw the ranks of a mesh: stages and tensor ranks from left to right, replicas and shards from top to bottom.

    Ranks of one colour hold the same parameters: only those of the other replicas do.
    `header` is `rank` or `ranks`, then the axes of the mesh.
    """

    def place(row: Sequence[str], *axes: str) -> str:
        return ", ".join(f"{name} {cell}" for name, cell in zip(header, row, strict=True) if name in axes)

    columns = [place(row, "stage", "stages", "tensor", "context") for row in rows]
    lines = [place(row, "replica", "shard") for row in rows]
    parts = [place(row, "stage", "stages", "tensor", "context", "shard") for row in rows]
    numbers = list(dict.fromkeys(parts))
    found = {(line, column): row for line, column, row in zip(lines, columns, range(len(rows)), strict=True)}
    x, y = list(dict.fromkeys(columns)), list(dict.fromkeys(lines))

    def cells(value: Callable[[int], object]) -> list[list[object]]:
        return [[value(found[line, column]) if (line, column) in found else None for column in x] for line in y]

    scale = [[number / max(1, len(numbers) - 1), COLOURS[number % len(COLOURS)]] for number in range(len(numbers))]
    figure = _heat_map(
        x=x,
        y=y,
        z=cells(lambda row: numbers.index(parts[row])),
        text=cells(lambda row: f"{header[0]} {rows[row][0]}"),
        texttemplate="%{text}",
        textfont={"color": "white"},
        hovertemplate="%{text}: %{x} %{y}<extra></extra>",
        colorscale=scale if len(scale) > 1 else [[0, COLOURS[0]], [1, COLOURS[0]]],
        xgap=3,
        ygap=3,
    )
    _lay_out_bars(figure, title, 1.6 * len(y), "")
    figure.update_xaxes(side="top", showgrid=False, ticks="")
    figure.update_yaxes(ticks="")
    return figure


def confusion(title: str, classes: Sequence[str], counts: Sequence[Sequence[int]]) -> go.Figure:
    """Draw a matrix of rows: a line for each true class, a column for each predicted one."""
    names = [label(name) for name in classes]
    shares = [[count / max(1, sum(row)) for count in row] for row in counts]
    figure = _heat_map(
        x=names,
        y=names,
        z=shares,
        text=[list(map(str, row)) for row in counts],
        texttemplate="%{text}" if len(names) <= 15 else "",
        hovertemplate="%{y}: %{text} rows predicted as %{x}<extra></extra>",
        colorscale="Blues",
        zmin=0,
        zmax=1,
    )
    _lay_out_bars(figure, title, len(names), "predicted")
    # The names below get room of their own: Plotly would take it from the matrix, and cover names with the title.
    longest = max(map(len, classes), default=0)
    upright = longest * len(names) > _ACROSS
    figure.update_xaxes(tickangle=-90 if upright else 0)
    figure.update_yaxes(title={"text": "true", "standoff": 8})
    figure.update_layout(height=figure.layout.height + (_LETTER * longest if upright else 0))
    return figure


def reliability(title: str, rows: Sequence[int], confidence: Sequence[float], right: Sequence[float]) -> go.Figure:
    """Draw the share of right decisions over their mean confidence, a point for each bin, beside the diagonal.

    Args:
        rows: the decisions of each bin, which give the area of its point.
    """
    figure = go.Figure()
    diagonal = {"color": COLOURS[0], "width": 1, "dash": "dot"}
    figure.add_scatter(x=[0, 1], y=[0, 1], mode="lines", line=diagonal, hoverinfo="skip", showlegend=False)
    sizes = [6 + 14 * math.sqrt(number / max(rows)) for number in rows]
    figure.add_scatter(
        x=list(confidence),
        y=list(right),
        mode="lines+markers",
        text=[f"{number:,} decisions" for number in rows],
        hovertemplate="confidence %{x:.3f}, right %{y:.3f}<br>%{text}<extra></extra>",
        line={"color": COLOURS[1], "width": 1},
        marker={"size": sizes, "color": COLOURS[1]},
        showlegend=False,
    )
    _lay_out(figure, title, "mean confidence of a bin", "share of right decisions")
    figure.update_layout(hovermode="closest")
    return figure


def parallel(title: str, axes: Sequence[str], found: Sequence[tuple[str, Sequence[float], Sequence[str]]]) -> go.Figure:
    """Draw parallel coordinates: a line for each name over all axes; the first line is the best and is drawn on top.

    Args:
        found: a name, its place on each axis from 0 to 1, and the text of each value.
    """
    figure = go.Figure()
    columns = [sorted((places[at], texts[at]) for _, places, texts in found) for at in range(len(axes))]
    ends = [dict.fromkeys(_rounded(column[at][1]) for at in (0, -1)) for column in columns]
    scaled = [f"{_folded(axis)}<br>{label(' to '.join(own))}" for axis, own in zip(axes, ends, strict=True)]
    for number, (name, places, texts) in reversed(list(enumerate(found))):
        figure.add_scatter(
            x=scaled,
            y=list(places),
            mode="lines+markers",
            name=label(name),
            text=list(map(label, texts)),
            hovertemplate="%{text}",
            line={"color": COLOURS[0 if number else 1], "width": 1 if number else 3},
            opacity=1 - 0.8 * number / max(1, len(found)),
            showlegend=False,
        )
    _lay_out(figure, title, "", "")
    figure.update_layout(hovermode="closest")
    figure.update_xaxes(automargin=True)  # a narrow page turns the names of the axes
    figure.update_yaxes(showticklabels=False)
    return figure


def _rounded(text: str) -> str:
    try:
        return f"{float(text):.3g}"
    except ValueError:
        return text


def _heat_map(**cells: Any) -> go.Figure:
    figure = go.Figure(go.Heatmap(showscale=False, **cells))
    figure.update_xaxes(type="category", automargin=True)
    figure.update_yaxes(type="category")
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
    _lay_out_bars(figure, title, 1.5 * len(found.ranks), "forward passes of one microbatch")
    figure.update_layout(barmode="overlay")
    figure.update_yaxes(type="category")
    return figure


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


def _folded(name: str) -> str:
    """Return the label of a group, in lines that leave room for bars on a narrow page."""
    return "<br>".join(map(label, textwrap.wrap(name, _LABEL, break_long_words=False) or [""]))


def _lay_out(figure: go.Figure, title: str, x_title: str, unit: str, buttons: Sequence[str] = ()) -> None:
    """Set the look of a figure. The page shows its title and buttons above it, and adds the height of its legend."""
    clear = "rgba(0,0,0,0)"
    figure.update_layout(
        meta={"title": title, "buttons": list(buttons)},
        height=_HEIGHT,
        margin={"l": 60, "r": 12, "t": 12, "b": 44},
        paper_bgcolor=clear,
        plot_bgcolor=clear,
        hovermode="x unified",
        legend={
            "orientation": "h", "y": 0, "yref": "container", "yanchor": "bottom", "x": 0, "xref": "container",
            "traceorder": "normal", "maxheight": 1000,
        },
        xaxis_title={"text": x_title, "standoff": 6},
        yaxis_title=unit,
        font={"color": "#6e7781"},
        template="none",
        modebar={"bgcolor": clear, "color": "#8a939c", "activecolor": "#3b7dd8", "remove": ["select2d", "lasso2d"]},
    )  # fmt: skip
    figure.update_xaxes(gridcolor="rgba(128,128,128,.25)", zeroline=False)
    figure.update_yaxes(gridcolor="rgba(128,128,128,.25)", zeroline=False)


def _lay_out_bars(figure: go.Figure, title: str, lines: float, x_title: str) -> None:
    """Set the look of a figure with rows from top to bottom, so high that each line has room for its name."""
    _lay_out(figure, title, x_title, "")
    figure.update_layout(hovermode="closest", height=max(_LEAST_HEIGHT, round(70 + _BAR * lines)))
    figure.update_yaxes(autorange="reversed", automargin=True, showgrid=False)
