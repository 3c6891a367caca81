"""A pickle that leaves a trace where anything reads it."""

from __future__ import annotations

import pickle
from pathlib import Path


class Trap:
    """Touches `marker` when a pickle that holds it is read; `marker` is to be absolute."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)

    def pickled(self) -> bytes:
        return pickle.dumps(self)
