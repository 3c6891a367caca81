"""The console of rich whose texts cannot control the terminal; styles, bars and cursor movements are its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from trainer.base.text import for_terminal


class SafeConsole(Console):
    """A console that escapes the control characters of each text, and that reads no markup in it."""

    def __init__(self, stream: TextIO | None = None, stderr: bool = False) -> None:
        super().__init__(file=stream, stderr=stderr, highlight=False, markup=False, emoji=False)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(for_terminal(text), **options)  # rich would drop some of them

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=for_terminal(segment.text))
