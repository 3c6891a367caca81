"""An HTML page without requests: sections of texts, tables and figures.

The figures are Plotly's: hovering, zooming and logarithmic axes need no code of ours. A page opens from a disk because
the library is part of it: the bundle of Plotly.js for axes, compressed, which the browser unpacks. It is of the version
in Plotly's Python package. A content security policy forbids every request.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import plotly.graph_objects as go
from plotly.io.json import to_json_plotly

from trainer.base.templates import templates

MISSING = "-"
"""The cell of a value that a run has not."""

_NUMBER = re.compile(r"[\d.,+-]+(e-?\d+)?( ?[a-zA-Z%]+)?")
_SHORT = 36  # characters of a cell that stays on one line
_NARROW = 4  # columns of a table beside others


def is_short(cell: str) -> bool:
    """Return whether a cell of a table stays on one line."""
    return len(cell) <= _SHORT


@dataclass(frozen=True)
class Table:
    """A table; its first column names the rows."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""

    @property
    def are_numbers(self) -> list[bool]:
        """Whether each column holds numbers only, perhaps with units."""
        return [
            any(column) and all(not cell or cell == MISSING or _NUMBER.fullmatch(cell) for cell in column)
            for column in zip(*self.rows, strict=True)
        ]

    @property
    def is_wide(self) -> bool:
        """Whether the table needs the width of the page."""
        return len(self.header) > _NARROW or any(not is_short(cell) for row in self.rows for cell in row)


@dataclass(frozen=True)
class Text:
    """Preformatted text, folded under its title."""

    title: str
    text: str


@dataclass(frozen=True)
class Marked:
    """A text of pieces; each has a mark, its text, and a note that may be empty."""

    title: str
    pieces: Sequence[tuple[str, str, str]]


@dataclass(frozen=True)
class Section:
    """A part of a page."""

    title: str
    blocks: Sequence[Table | Text | Marked | go.Figure | str]  # a plain string is a paragraph

    @property
    def is_of_pairs(self) -> bool:
        """Whether two figures in a line look better than three: the last line is full."""
        return sum(_kind(block) == "figure" for block in self.blocks) in (2, 4)


def label(text: str) -> str:
    """Return a text for a figure: Plotly reads some HTML elements in names."""
    return escape(text, quote=False)


def render(title: str, sections: Sequence[Section]) -> str:
    """Return a page; texts of all blocks stay texts."""

    def drawn(figure: go.Figure) -> str:
        # Plotly's own bar of buttons has one that uploads the figure to its company, unless it is switched off.
        config = {"responsive": True, "displaylogo": False, "showSendToCloud": False, "plotlyServerURL": ""}
        image = {"filename": re.sub(r"\W+", "_", figure.layout.meta["title"]), "scale": 2}
        config |= {"displayModeBar": "hover", "toImageButtonOptions": image}
        found = figure.to_plotly_json()
        return str(to_json_plotly({"data": found["data"], "layout": found["layout"], "config": config}))

    page = _template().render(
        title=title, sections=sections, plotly=_library(), drawn=drawn, kind=_kind, is_short=is_short
    )
    return page.encode(errors="backslashreplace").decode()  # halves of surrogate pairs have no encoding


@cache
def _library() -> str:
    return b64encode(files(__package__).joinpath("plotly-cartesian.min.js.gz").read_bytes()).decode()


@cache
def _template() -> jinja2.Template:
    return templates(Path(__file__).parent, autoescape=True).get_template("page.html.jinja")


def _kind(block: Any) -> str:
    return {Table: "table", Text: "text", Marked: "marked", str: "paragraph"}.get(type(block), "figure")
