"""HTML pages in Debian's browser Chromium."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

needs_browser = pytest.mark.skipif(shutil.which("chromium") is None, reason="needs the browser chromium")

_QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)  # fmt: skip
_SECONDS = 240
_POLICY = re.compile('<meta http-equiv="Content-Security-Policy" content="([^"]*)">')
_END = """<script>addEventListener("drawn", () => { {script}
  document.body.dataset.requests =
  performance.getEntriesByType("resource").map(one => one.name).join(" "); });</script>"""


CURVE = re.compile(r'<g class="lines"[^>]*><path d="M')
"""A drawn curve."""


@dataclass(frozen=True)
class Opened:
    """A page after its scripts.

    Args:
        dom: its elements, as HTML.
        console: the lines of its console, among them failed requests.
        requests: the addresses that it asks for.
        policy: its content security policy, which was taken away before, so that requests are seen.
    """

    dom: str
    console: list[str]
    requests: list[str]
    policy: str


def open_page(page: Path, folder: Path, script: str = "") -> Opened:
    """Open a page, and run a script when its figures are drawn.

    Args:
        page: the file.
        folder: an existing folder for the browser's own files.
        script: JavaScript.
    """
    text = page.read_text(encoding="utf-8")
    policy = _POLICY.search(text)
    assert policy is not None
    text = _POLICY.sub("", text).replace("</body>", _END.replace("{script}", script) + "</body>")
    opened = folder / "opened.html"
    opened.write_text(text, encoding="utf-8")
    options = ["--enable-logging=stderr", f"--user-data-dir={folder / 'browser'}", "--virtual-time-budget=10000"]
    command = ["chromium", *_QUIET, *options, "--dump-dom", opened.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    requests = re.search(r'<body[^>]* data-requests="([^"]*)"', done.stdout)
    assert requests is not None, "the page did not load"
    return Opened(done.stdout, console, requests[1].split(), policy[1])
