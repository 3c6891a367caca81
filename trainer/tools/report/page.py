"""An HTML page without requests: sections of texts, tables and figures.

The figures are those of Plotly's Python package, as data. `figures.js`, a part of the page, draws them as SVG with
values under the pointer, logarithmic axes and moving averages. A content security policy forbids every request.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import jinja2
import plotly.graph_objects as go
from plotly.io.json import to_json_plotly

from trainer.base.templates import templates
from trainer.tools.report import MISSING

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
        found = figure.to_plotly_json()
        return str(to_json_plotly({"data": found["data"], "layout": found["layout"]}))

    page = _template().render(title=title, sections=sections, drawn=drawn, kind=_kind, is_short=is_short)
    return page.encode(errors="backslashreplace").decode()  # halves of surrogate pairs have no encoding


@cache
def _template() -> jinja2.Template:
    return templates(Path(__file__).parent, autoescape=True).get_template("page.html.jinja")


def _kind(block: Any) -> str:
    return {Table: "table", Text: "text", Marked: "marked", str: "paragraph"}.get(type(block), "figure")
