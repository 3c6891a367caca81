"""Pictures of the README and the pages: `python -m docs.pictures`, in a clone.

It makes the two comparisons, in some minutes, unless they are in `runs/` already. The browser Chromium draws their
figures, because Plotly's figures are drawn by a browser. The picture of the terminal is the screen of a run that starts
here; the terminal emulator pyte of the extra `docs` reads it. That of a page is made after a whole run of the sample.
"""

from __future__ import annotations

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
from html import unescape
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import plotly.graph_objects as go
from PIL import Image
from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots
from rich.console import Console
from rich.style import Style
from rich.text import Text

from trainer.base.disk import replace_text
from trainer.tools.compare.comparison_page import EQUAL
from trainer.tools.report.figures import COLOURS, ranges
from trainer.tools.tolerances import difference

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"
_SECONDS = 120
_BROWSER = (
    "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--virtual-time-budget=20000",
)  # fmt: skip
_SCRIPT = """Plotly.newPlot(document.body, {figure}).then(drawn => Plotly.toImage(drawn,
  {{format: "svg", width: {width}, height: {height}}})).then(url => {{ document.body.textContent = url; }});"""


def layouts_figure(results: list[dict[str, Any]]) -> go.Figure:
    """Draw the time of a step with its quartiles, and the planned peak of tensors, of each layout."""
    found = [one for one in results if one["step_seconds"]]
    names = [one["name"] for one in found]
    figure = make_subplots(1, 2, shared_yaxes=True, subplot_titles=("time of a step, ms", "planned tensors, MiB"))
    times = [tuple(1e3 * value for value in one["step_seconds"]) for one in found]
    drawn = ranges("", list(zip(names, times, strict=True)), "ms")
    (bars_of_times,) = drawn.data
    figure.add_trace(bars_of_times, row=1, col=1)
    figure.update_xaxes(range=drawn.layout.xaxis.range, row=1, col=1)
    planned = [one["plan"]["peak_bytes"] / 2**20 if one["plan"] else 0 for one in found]
    figure.add_bar(y=bars_of_times.y, x=planned, orientation="h", marker_color=COLOURS[2], row=1, col=2)
    figure.update_xaxes(title="ZeRO: with buckets of a fixed size", row=1, col=2)
    figure.update_yaxes(autorange="reversed", automargin=True)
    return figure


def dropout_figure(results: list[dict[str, Any]]) -> go.Figure:
    """Draw the difference of losses in four microbatches from those in two, with our dropout and with torch's."""
    losses = {one["name"]: {step["step"]: step["loss"] for step in one["records"]} for one in results}
    ours, ours_cut, torchs, torchs_cut = losses.values()
    figure = go.Figure()
    for number, (name, whole, cut) in enumerate((("trainer", ours, ours_cut), ("torch's dropout", torchs, torchs_cut))):
        apart = [max(difference(cut[step], whole[step]), EQUAL) for step in whole]
        figure.add_scatter(x=list(whole), y=apart, name=name, mode="lines", line_color=COLOURS[number])
    figure.update_yaxes(type="log", exponentformat="power", title="relative difference of the loss")
    figure.update_xaxes(title="step")
    return figure


def svg_of(figure: go.Figure, width: int, height: int) -> str:
    """Return a figure as SVG, in pixels; grey text is legible on light and dark ground."""
    figure.update_layout(
        template="none", font={"color": "#7d8590", "size": 12}, paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)", showlegend=all(trace.name for trace in figure.data),
        margin={"l": 70, "r": 10, "t": 30, "b": 40},
    )  # fmt: skip
    figure.update_xaxes(gridcolor="rgba(128,128,128,.25)")
    figure.update_yaxes(gridcolor="rgba(128,128,128,.25)")
    script = _SCRIPT.format(figure=figure.to_json(), width=width, height=height)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(f"<body></body><script>{get_plotlyjs()}</script><script>{script}</script>", encoding="utf-8")
        options = [f"--user-data-dir={folder}/browser", "--dump-dom", page.as_uri()]
        done = subprocess.run([*_BROWSER, *options], capture_output=True, text=True, timeout=_SECONDS, check=True)
    found = re.search(r"<body[^>]*>data:image/svg\+xml,(.*?)</body>", done.stdout, re.DOTALL)
    if found is None:
        raise RuntimeError("the browser must draw the figure, but drew nothing; open the page in it for its error")
    return unquote(unescape(found[1])) + "\n"


def page_png(page: Path, picture: Path, width: int, height: int) -> None:
    """Write the top of a page as a picture of some colours, in pixels."""
    with tempfile.TemporaryDirectory() as folder:
        options = [f"--user-data-dir={folder}/browser", f"--window-size={width},{height}", f"--screenshot={picture}"]
        subprocess.run([*_BROWSER, *options, page.resolve().as_uri()], timeout=_SECONDS, check=True)
    with Image.open(picture) as drawn:
        drawn.convert("RGB").quantize(48).save(picture, optimize=True)


def terminal_svg(command: list[str], size: tuple[int, int], *until: str) -> str:
    """Return the screen of a command in an empty folder as SVG, as soon as it shows all texts.

    Args:
        command: the program and its arguments, which the title shows.
        size: columns and lines of the terminal.
        until: the texts; the command is then stopped.
    """
    import pyte

    columns, lines = size
    screen = pyte.Screen(columns, lines)
    stream = pyte.ByteStream(screen)
    with tempfile.TemporaryDirectory() as folder:
        child, terminal = pty.fork()
        if child == 0:
            os.chdir(folder)
            os.environ |= {"TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": str(lines)}
            os.execvp(command[0], command)
        while not all(any(text in line for line in screen.display) for text in until):
            stream.feed(os.read(terminal, 1 << 16))
        os.killpg(child, signal.SIGINT)
        while _is_open(terminal):
            pass
        os.waitpid(child, 0)
        os.close(terminal)
    shown = Console(record=True, width=columns, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for number in range(lines):
        row = screen.buffer[number]
        line = Text(overflow="crop", no_wrap=True)
        characters = [row[column] for column in range(columns)]
        for (colour, is_bold), alike in groupby(characters, lambda character: (character.fg, character.bold)):
            line.append("".join(character.data for character in alike), Style(color=_colour(colour), bold=is_bold))
        shown.print(line)
    svg = shown.export_svg(title=" ".join(command))
    # The format of rich fetches its font from the network.
    return re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)


def _is_open(terminal: int) -> bool:
    """Read what comes next; return whether the program still has the terminal."""
    try:
        return bool(os.read(terminal, 1 << 16))
    except OSError:
        return False


def _colour(name: str) -> str | None:
    if name == "default":
        return None
    return f"#{name}" if re.fullmatch(r"[0-9a-f]{6}", name) else {"brown": "yellow"}.get(name, name)


def main() -> None:
    """Draw the pictures from the results of two comparisons, and from a run that is stopped in the middle."""
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))  # of the commands
    for words in (
        ["--processes", "2", "--steps", "30"],
        ["--layouts", "docs/pictures/dropout.txt", "--steps", "60", "--output", "runs/dropout-compare"],
    ):
        subprocess.run(["trainer", "compare", "bert_sample", *words], cwd=ROOT, check=True)
    run = ["trainer", "run", "bert_sample", "--processes", "2"]
    replace_text(PICTURES / "terminal.svg", terminal_svg(run, (112, 24), "step 450/", "━"))
    print(PICTURES / "terminal.svg")  # noqa: T201
    for words in ("run bert_sample name=report --processes 2", "report runs/report"):
        subprocess.run(["trainer", *words.split()], cwd=ROOT, check=True)
    page_png(ROOT / "runs" / "report" / "report.html", PICTURES / "report.png", 1320, 660)
    print(PICTURES / "report.png")  # noqa: T201
    for name, source, draw, size in (
        ("layouts", "bert_sample-compare", layouts_figure, (860, 330)),
        ("dropout", "dropout-compare", dropout_figure, (860, 260)),
    ):
        results = json.loads((ROOT / "runs" / source / "compare.json").read_text(encoding="utf-8"))["results"]
        replace_text(PICTURES / f"{name}.svg", svg_of(draw(results), *size))
        print(PICTURES / f"{name}.svg")  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
