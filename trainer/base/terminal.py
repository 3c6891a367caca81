"""The writer of texts for a terminal: values in them can neither control it nor change the shown text.

Everything that the program shows goes through `write`, or through the console of `drawn.py`; `guard` adds the output
of libraries and of Python. It is the same in a pipe, which may lead to a terminal.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TextIO

from trainer.base.text import for_terminal, json_for_terminal, one_line

_STYLE = re.compile("\x1b\\[[0-9;]*m")


def write(text: str, stream: TextIO) -> None:
    """Write a text with its control characters escaped; a character that the stream lacks does not end the program."""
    _put(for_terminal(text), stream)


def write_lines(lines: Iterable[str], stream: TextIO) -> None:
    """Write lines; a line break in one comes from a value, and is escaped too."""
    write("".join(f"{one_line(line)}\n" for line in lines), stream)


def say(*lines: str, err: bool = False) -> None:
    """Write lines to the standard output, or to the standard error; see `write_lines`."""
    write_lines(lines, sys.stderr if err else sys.stdout)


def say_text(text: str, *, err: bool = False) -> None:
    """Write a text of the program with line breaks of its own, which ends with one."""
    write(text if text.endswith("\n") else f"{text}\n", sys.stderr if err else sys.stdout)


def say_json(text: str, end: str = "\n") -> None:
    """Write JSON, perhaps with comments, to the standard output; programs read the same values."""
    _put(json_for_terminal(f"{text}{end}"), sys.stdout)


def say_styled(text: str) -> None:
    """Write a text with styles, which only a terminal gets; values in it are escaped already."""
    _put(f"{text if sys.stdout.isatty() else _STYLE.sub('', text)}\n", sys.stdout)


def _put(text: str, stream: TextIO) -> None:
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(text.encode(encoding, errors="backslashreplace").decode(encoding))
    # At once, so that lines of both streams keep their order in one terminal or file.
    stream.flush()


def guard() -> None:
    """Escape the warnings and log records of libraries too, and tracebacks; for a process that is a program of ours."""
    # All handlers read records of this class, also those of libraries.
    logging.setLogRecordFactory(_Record)
    formatwarning = warnings.formatwarning
    warnings.formatwarning = lambda *arguments, **options: for_terminal(formatwarning(*arguments, **options))
    sys.excepthook = _show
    threading.excepthook = lambda failed: _show(failed.exc_type, failed.exc_value, failed.exc_traceback)


@contextmanager
def quiet(logger: str, level: int = logging.CRITICAL) -> Iterator[None]:
    """Hide the records of a library's logger below a level."""
    log = logging.getLogger(logger)
    before = log.level
    log.setLevel(level)
    try:
        yield
    finally:
        log.setLevel(before)


class _Record(logging.LogRecord):
    def getMessage(self) -> str:  # noqa: N802  # the name of the library
        return for_terminal(super().getMessage())


def _show(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    if not issubclass(kind, SystemExit):  # which ends a thread as it does without this function
        write("".join(traceback.format_exception(kind, error, trace)), sys.stderr)
