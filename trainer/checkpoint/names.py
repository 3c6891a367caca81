"""The names of the folders of checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

_FOLDER_NAME = re.compile(r"step-([0-9]{8,15})")


def steps_of(names: Iterable[str]) -> list[int]:
    """Return the steps of the names that are those of checkpoints' folders, oldest first."""
    return sorted(int(match[1]) for match in map(_FOLDER_NAME.fullmatch, names) if match)


def saved_steps(run: Path) -> list[int]:
    """Return the steps of a run's checkpoints, oldest first; their folders get these names when they are complete."""
    return steps_of(path.name for path in run.glob("checkpoints/step-*") if path.is_dir())
