"""Templates of texts and pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2


def templates(folder: Path, **options: Any) -> jinja2.Environment:
    """Return the templates of a folder; a name without a value is an error, and lines of tags leave nothing.

    Args:
        options: further options of jinja2.
    """
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        **options,
    )
