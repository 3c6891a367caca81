"""Files in the run's folder that grow line by line, and that a resumed run continues.

`metrics.jsonl` and the CSV files share the form of numbers, the writing of lines and the errors of a full disk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from io import FileIO
from pathlib import Path
from typing import Any

from trainer.base.disk import replace_text
from trainer.base.errors import TrainerError, storage_error

_NON_FINITE = ("NaN", "Infinity", "-Infinity")


def encode_number(value: float) -> float | str:
    """Return a finite number unchanged, and others by their names in protocol buffers' JSON mapping."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def decode_number(value: Any) -> Any:
    """Return the argument of the `encode_number` call that returned `value`."""
    return float(value) if value in _NON_FINITE else value


class GrowingFile:
    """A text file of whole lines; `add` passes each line to the operating system before it returns.

    Args:
        path: the path of the file; its folder is created.
        lines: returns the first lines, without line breaks. They replace the old content atomically: a kill leaves the
            old file or the new file.

    Raises:
        UsageError: the folder cannot be written.
        TrainerError: the disk is full. Errors of `lines` are passed on.
    """

    def __init__(self, path: Path, lines: Callable[[], Iterable[str]]) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(path, "".join(f"{line}\n" for line in lines()))
            # No buffer: when the file is closed, a failed write would be repeated, and would fail again.
            self._file: FileIO = path.open("ab", buffering=0)
        except OSError as error:
            raise storage_error(
                f"`checkpoint.folder` must be a folder that can be written, but `{path}` cannot be"
                f" ({error.strerror}); make room or choose another",
                error,
            ) from error

    def add(self, line: str) -> None:
        """Write one line.

        Raises:
            TrainerError: the disk is full, or the folder was deleted.
        """
        rest = memoryview(f"{line}\n".encode())
        try:
            while rest:  # a nearly full disk accepts only a part
                rest = rest[self._file.write(rest) :]
            self._path.stat()  # writes to a deleted file succeed
        except OSError as error:
            raise TrainerError(
                f"{self._path} can no longer be written ({error.strerror}); make room or restore the folder, then start"
                " the run again"
            ) from error

    def close(self) -> None:
        """Close the file; may be called twice."""
        self._file.close()
