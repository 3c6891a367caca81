"""The columns of chats, for `trainer init`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainer.features import Columns


def of_chats(columns: Columns) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the section `task` and the reason for it."""
    chat = columns.get(("chat",), "messages", "conversations", "conversation", "chat")
    chat = chat or next((column for column in columns.all if column.kind == "chat"), None)
    if chat is not None:
        tools = columns.get(("objects", "text"), "tools")
        keys = {} if tools is None else {"tools": tools.name}
        yield {"type": "causal_lm", "messages": chat.name, **keys}, f"`{chat.name}` holds chats"
