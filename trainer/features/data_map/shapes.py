"""Known shapes of chats and instructions, which are recognised by their columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from trainer.features.data_map.section import ChatKeys, DataMap, FlagColumns, MadeMessage, MappedColumn

Mapped: TypeAlias = "str | MappedColumn | FlagColumns | Sequence[MadeMessage]"
"""A new column in the form of the recipe."""

_CONVERSATIONS, _MESSAGES, SYSTEM, _HISTORY = "conversations", "messages", "system", "history"
OF_ALPACA = ("instruction", "input", "output", SYSTEM)
_SHAREGPT = ChatKeys(
    role="from",
    content="value",
    roles={
        "human": "user", "gpt": "assistant", "function_call": "tool_calls", "observation": "tool",
    },
)  # fmt: skip


def stays(section: DataMap, wanted: Sequence[str], values: Mapping[str, Sequence[Any]]) -> bool:
    """Return whether a map leaves the rows of a source as they are; see `RowMap.of`."""
    is_default = section.columns is None and not section.where and section.shape in ("auto", "none")
    return is_default and not columns_of_shape(section.shape, wanted, values)[0]


def columns_of_shape(
    shape: str, wanted: Sequence[str], values: Mapping[str, Sequence[Any]], predicts: bool = False
) -> tuple[dict[str, Mapped], str]:
    """Return the columns of a known shape, and a note; no columns if the rows do not have it, or need no conversion."""
    columns: dict[str, Mapped] = {}
    missing = [name for name in wanted if name not in values]
    if shape in ("auto", "sharegpt"):
        keys = _SHAREGPT.model_copy(update={"system": SYSTEM}) if SYSTEM in values else _SHAREGPT
        for name in wanted:
            source = _CONVERSATIONS if name in missing and name == _MESSAGES else name
            if source in values and _holds_sharegpt(values[source]):
                columns[name] = MappedColumn(column=source, chat=keys)
            elif source in values and source != name:
                columns[name] = source
    needed = {"instruction"} if predicts else {"instruction", "output"}
    if columns or shape not in ("auto", "alpaca") or not needed <= values.keys():
        return columns, "chats in the shape of ShareGPT are read as messages"
    found = {name: mapped for name, mapped in _alpaca(values).items() if name in missing}
    return found, "made from the columns of Alpaca"


def _holds_sharegpt(values: Sequence[Any]) -> bool:
    """Return whether the first chat of a column, a list or a message, has `from` and `value`."""
    chat = next((value for value in values if isinstance(value, list | dict) and value), None)
    first = chat[0] if isinstance(chat, list) else chat
    return isinstance(first, dict) and {"from", "value"} <= first.keys() and "role" not in first


def _holds_turns(values: Sequence[Any]) -> bool:
    """Return whether a column may hold lists of pairs; that of texts has no values here, or texts."""
    chat: Any = next(filter(None, values), [])
    return len(values) > 0 and isinstance(chat, list) and all(isinstance(pair, list) for pair in chat)


def _alpaca(columns: Mapping[str, Sequence[Any]]) -> dict[str, Mapped]:
    question = "{instruction}[\n{input}]" if "input" in columns else "{instruction}"
    system = [MadeMessage(role="system", content="[{system}]")] if SYSTEM in columns else []
    history = [MadeMessage(role="turns", content=_HISTORY)] if _holds_turns(columns.get(_HISTORY, ())) else []
    return {
        _MESSAGES: [
            *system, *history, MadeMessage(role="user", content=question),
            MadeMessage(role="assistant", content="{output}"),
        ],
        "prompt": question,
        "completion": "output",
    }  # fmt: skip
