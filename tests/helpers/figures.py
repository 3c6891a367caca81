"""The figures of an HTML page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

_FIGURE = re.compile(r'Plotly\.newPlot\(\s*"figure-\d+",\s*(\[.*?\]),\s*(\{.*?\}),\s*\{"responsive', re.DOTALL)


def figures_of(page: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the traces of each figure by its title."""
    found = _FIGURE.findall(page.read_text(encoding="utf-8"))
    return {json.loads(layout)["meta"]["title"]: json.loads(traces) for traces, layout in found}
