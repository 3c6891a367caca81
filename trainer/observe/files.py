"""Files in the run's folder that grow by a line at a time, and go on where a resumed run does.

What `metrics.jsonl` and the CSV files share: how a number stands in them, how lines are replaced and added, and what a
user reads when the disk is full.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from io import FileIO
from pathlib import Path
from typing import Any

from trainer.base.disk import replace_text
from trainer.base.errors import TrainerError, UsageError

_NON_FINITE = ("NaN", "Infinity", "-Infinity")


def encode_number(value: float) -> float | str:
    """A number that JSON has a word for, or its name in protocol buffers' JSON mapping."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def decode_number(value: Any) -> Any:
    """What `encode_number` was given."""
    return float(value) if value in _NON_FINITE else value


class GrowingFile:
    """A text file to which whole lines are added; each is out of the process before `add` returns.

    Args:
        path: of the file; its folder is made.
        lines: gives what it begins with, without line breaks. They take the place of what it held, such that a kill at
            any moment leaves the old file or the new one.

    Raises:
        UsageError: the folder cannot be written, or what `lines` raises.
    """

    def __init__(self, path: Path, lines: Callable[[], Iterable[str]]) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(path, "".join(f"{line}\n" for line in lines()))
            # No buffer: what could not be written would be tried again, and fail again, when the file is closed.
            self._file: FileIO = path.open("ab", buffering=0)
        except OSError as error:
            raise UsageError(
                f"`checkpoint.folder` must be a folder that can be written, but `{path.parent}` is not"
                f" ({error.strerror}); choose another"
            ) from error

    def add(self, line: str) -> None:
        """Writes one line.

        Raises:
            TrainerError: the disk is full, or the folder was deleted.
        """
        rest = memoryview(f"{line}\n".encode())
        try:
            while rest:  # a disk that is nearly full takes a part
                rest = rest[self._file.write(rest) :]
            self._path.stat()  # a file that was deleted takes everything
        except OSError as error:
            raise TrainerError(
                f"{self._path} can no longer be written ({error.strerror}); make room or restore the folder, then start"
                " the run again"
            ) from error

    def close(self) -> None:
        """May be called twice."""
        self._file.close()
