"""Optional parts of a training, each a folder that can be deleted. The floors below import none of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Columns(Protocol):
    """The columns of a data set, for rules of `trainer init` (the registered kind `shape`)."""

    all: Sequence[Any]
    texts: Sequence[Any]  # those that may hold texts to learn
    text: Any  # the column that `task.text` names, and that of `task.label`; None: the user names none
    label: Any

    def get(self, kinds: Sequence[Any], *names: str) -> Any: ...
    def every(self, kinds: Sequence[Any], *names: str) -> list[str]: ...
    def labels(self, texts: Sequence[str] = ()) -> Sequence[Any]: ...
