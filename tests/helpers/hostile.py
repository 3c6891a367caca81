"""A pickle that leaves a trace when it is loaded."""

from __future__ import annotations

import pickle
from pathlib import Path


class Trap:
    """An object that creates the file `marker` (an absolute path) when its pickle is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)

    def pickled(self) -> bytes:
        return pickle.dumps(self)
