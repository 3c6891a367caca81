"""An HTML page without requests: sections of texts, tables and figures.

The figures are Plotly's: hovering, zooming and logarithmic axes need no code of ours, and a page opens from a disk
because the library is part of it, which makes each page 4.8 MB large. A content security policy forbids every request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import jinja2
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs


@dataclass(frozen=True)
class Table:
    """A table; its first column names the rows."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


@dataclass(frozen=True)
class Text:
    """Preformatted text, folded under its title."""

    title: str
    text: str


@dataclass(frozen=True)
class Section:
    """A part of a page."""

    title: str
    blocks: Sequence[Table | Text | go.Figure | str]  # a plain string is a paragraph


def label(text: str) -> str:
    """Return a text for a figure: Plotly reads some HTML elements in names."""
    return escape(text, quote=False)


def render(title: str, sections: Sequence[Section]) -> str:
    """Return a page; texts of all blocks stay texts."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("trainer.reporting", ""),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    number = 0

    def drawn(figure: go.Figure) -> str:
        nonlocal number
        number += 1
        config = {"responsive": True, "displaylogo": False}
        div = f"figure-{number}"
        return str(figure.to_html(config=config, include_plotlyjs=False, full_html=False, div_id=div))

    return environment.get_template("page.html.jinja").render(
        title=title, sections=sections, plotly=get_plotlyjs(), drawn=drawn, kind=_kind
    )


def _kind(block: Any) -> str:
    return {Table: "table", Text: "text", str: "paragraph"}.get(type(block), "figure")
