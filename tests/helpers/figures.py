"""The figures of an HTML page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

_FIGURE = re.compile(r'<script type="application/json">(.*?)</script>', re.DOTALL)


def figures_of(page: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the traces of each figure by its title."""
    found = map(json.loads, _FIGURE.findall(page.read_text(encoding="utf-8")))
    return {one["layout"]["meta"]["title"]: one["data"] for one in found}
