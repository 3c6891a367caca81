"""Notes of a thread that works beside the training."""

from __future__ import annotations

import queue
from collections.abc import Callable


class ThreadNotes:
    """A queue of notes, which any thread fills, and the thread of the training shows.

    Args:
        note: shows a note to the user.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.kinds: set[str] = set()  # of the notes that `put_once` has added

    def put(self, text: str) -> None:
        """Add a note."""
        self._waiting.put(text)

    def put_once(self, kind: str, text: str) -> None:
        """Add a note, unless there was one of its kind."""
        if kind not in self.kinds:
            self.kinds.add(kind)
            self.put(text)

    def show(self) -> None:
        """Show all notes that wait."""
        while not self._waiting.empty():
            self._note(self._waiting.get())
