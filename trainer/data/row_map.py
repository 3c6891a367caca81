"""The columns that `data.map` makes from those of a source: a function from rows to rows, for files and streams.

Known shapes of chats and instructions are maps too, which are recognised by their columns.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from trainer.base.errors import DataError
from trainer.base.nulls import given
from trainer.base.text import listed
from trainer.data.formats.base import json_chats
from trainer.recipe.row_texts import Comparison, Template, text_of
from trainer.recipe.schema import ChatKeys, DataMap, MadeMessage, MappedColumn, is_template

Columns: TypeAlias = Mapping[str, Sequence[Any]]
"""A batch of rows, by column."""
Mapped: TypeAlias = "str | MappedColumn | Sequence[MadeMessage]"
"""A new column in the form of the recipe."""

_UNUSABLE = (ValueError, OverflowError, RecursionError)
"""Errors of values of a source that a map cannot use: wrong, too large for a number, or nested too deeply."""

_INTEGER = re.compile(r"[+-]?\d{1,18}")
_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_MOST = 10  # columns and values in a message

_CONVERSATIONS, _MESSAGES = "conversations", "messages"
_SHAREGPT = ChatKeys(
    role="from",
    content="value",
    roles={
        "human": "user", "gpt": "assistant", "function_call": "tool_calls", "observation": "tool",
    },
)  # fmt: skip


@dataclass(frozen=True)
class RowMap:
    """A map from the rows of a source to those of the task.

    Attributes:
        columns: the new columns, in the form of the recipe.
        conditions: the conditions that rows must fulfil.
        keeps_others: whether the other columns of the source stay.
        notes: notes for the user.
    """

    columns: Mapping[str, Mapped]
    conditions: tuple[Comparison, ...] = ()
    keeps_others: bool = False
    notes: tuple[str, ...] = ()
    _makers: Mapping[str, _Maker] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_makers", {name: _maker(mapped) for name, mapped in self.columns.items()})

    @classmethod
    def of(
        cls,
        section: DataMap,
        wanted: Sequence[str],
        values: Mapping[str, Sequence[Any]],
        where: str,
        predicts: bool = False,
    ) -> RowMap | None:
        """Return the map of a source; None if it leaves the rows as they are.

        Args:
            section: the section of the recipe.
            wanted: the columns that the task reads.
            values: the columns of the source, with the first values of those that may hold chats.
            where: the name of the source in messages.
            predicts: whether the map is of all rows, without the last answers of chats and columns that are not wanted.

        Raises:
            DataError: a column is missing.
        """
        notes: list[str] = []
        columns: Mapping[str, Mapped] = section.columns or {}
        if section.columns is None:
            columns, notes = _shape(section.shape, wanted, values, where, predicts)
        if predicts:
            columns = {name: _question(mapped) for name, mapped in columns.items() if name in wanted}
        conditions = () if predicts else tuple(map(Comparison.parse, section.where))
        found = cls(columns, conditions, section.columns is None, tuple(notes))
        if section.columns is None and not columns and not conditions:
            return None
        for name, maker in found._makers.items():
            _require(maker.sources, values, f"data.map.columns.{name}", where)
        _require([condition.column for condition in conditions], values, "data.map.where", where)
        return found

    @classmethod
    def of_input(
        cls, section: DataMap, wanted: Sequence[str], rows: Sequence[Mapping[str, Any]], where: str
    ) -> RowMap | None:
        """Return the map of a file to predict, given its first rows; see `of`."""
        names = dict.fromkeys(name for row in rows for name in row)
        return cls.of(section, wanted, {name: [row.get(name) for row in rows] for name in names}, where, predicts=True)

    @property
    def renamed(self) -> dict[str, str]:
        """The columns of the source with values that stay as they are, by their new names."""
        return {name: maker.sources[0] for name, maker in self._makers.items() if maker.make is None}

    @property
    def made(self) -> RowMap:
        """The map of the other columns alone."""
        renamed = self.renamed
        return RowMap({name: mapped for name, mapped in self.columns.items() if name not in renamed})

    @property
    def sources(self) -> tuple[str, ...]:
        """The columns of the source that are read, each once."""
        return tuple(dict.fromkeys(source for maker in self._makers.values() for source in maker.sources))

    def features(self, features: Mapping[str, Any]) -> dict[str, Any]:
        """Return the types of the mapped columns, given those of the source."""
        kept = features if self.keeps_others else {}
        return {**kept, **{name: maker.feature(features) for name, maker in self._makers.items()}}

    def keeps(self, rows: Columns, numbers: Sequence[int], where: str) -> list[int]:
        """Return the places in a batch of the rows that fulfil all conditions.

        Args:
            rows: the batch.
            numbers: the index of each row in the source, for messages.
            where: the name of the source in messages.

        Raises:
            DataError: a value cannot be compared.
        """
        kept = []
        for place, number in enumerate(numbers):
            for condition in self.conditions:
                try:
                    if not condition.holds(rows[condition.column][place]):
                        break
                except _UNUSABLE as error:
                    raise DataError(
                        f"`data.map.where`: column `{condition.column}`, row {number + 1} of {where} {error}; correct"
                        " the value or the condition"
                    ) from None
            else:
                kept.append(place)
        return kept

    def of_rows(self, rows: Sequence[Mapping[str, Any]], first_row: int, where: str) -> list[dict[str, Any]]:
        """Return mapped rows, given consecutive rows of a file and the index of the first; see `__call__`."""
        names = dict.fromkeys([*self.sources, *(name for row in rows for name in row)])
        columns = {name: [row.get(name) for row in rows] for name in names}
        mapped = self(columns, range(first_row, first_row + len(rows)), where)
        return [{name: values[place] for name, values in mapped.items()} for place in range(len(rows))]

    def __call__(
        self, rows: Columns, numbers: Sequence[int], where: str, features: Mapping[str, Any] | None = None
    ) -> dict[str, Sequence[Any]]:
        """Return the mapped columns of a batch; `features` are the types of the source, if it has any.

        Raises:
            DataError: a value cannot be mapped; the message names the row.
        """
        found = dict(rows) if self.keeps_others else {}
        for name, maker in self._makers.items():
            if maker.make is None:
                found[name] = rows[maker.sources[0]]
                continue
            columns = {
                source: given(list(rows[source]), [features[source]]) if features else rows[source]
                for source in maker.sources
            }
            values = []
            for place, number in enumerate(numbers):
                try:
                    values.append(maker.make({source: column[place] for source, column in columns.items()}))
                except _UNUSABLE as error:
                    raise DataError(
                        f"`data.map.columns.{name}`, row {number + 1} of {where}: {error}; correct the value, or leave"
                        " the row out by `data.map.where`"
                    ) from None
            found[name] = values
        return found


@dataclass(frozen=True)
class _Maker:
    """A new column: the columns of the source, its type given theirs, and the value for a row; None: as it is."""

    sources: tuple[str, ...]
    feature: Callable[[Mapping[str, Any]], Any]
    make: Callable[[Mapping[str, Any]], Any] | None = None


def _maker(mapped: Mapped) -> _Maker:
    if isinstance(mapped, str):
        if not is_template(mapped):
            return _Maker((mapped,), lambda features: features[mapped])
        template = Template.parse(mapped)
        return _Maker(template.columns, _values("string"), template.fill)
    if not isinstance(mapped, MappedColumn):
        templates = [(message.role, Template.parse(message.content)) for message in mapped]
        sources = tuple(dict.fromkeys(column for _, template in templates for column in template.columns))
        return _Maker(sources, lambda _: json_chats(), lambda row: _made_chat(templates, row))
    source = mapped.column
    if (keys := mapped.chat) is not None:
        return _Maker((source,), lambda _: json_chats(), lambda row: _chat(row[source], keys))
    if (table := mapped.values) is not None:
        kind = {str: "string", bool: "bool", int: "int64", float: "float64"}[type(next(iter(table.values())))]
        return _Maker((source,), _values(kind), lambda row: _looked_up(row[source], table, source))
    if mapped.type is None:
        return _Maker((source,), lambda features: features[source])
    kind, cast = _CASTS[mapped.type]
    return _Maker((source,), _values(kind), lambda row: _cast(row[source], cast, source))


def _values(kind: str) -> Callable[[Mapping[str, Any]], Any]:
    def feature(_: Mapping[str, Any]) -> Any:
        import datasets

        return datasets.Value(kind)

    return feature


def _require(names: Iterable[str], columns: Iterable[str], key: str, where: str) -> None:
    for name in names:
        if name not in columns:
            raise DataError(
                f"`{key}` names the column `{name}`, but {where} has none of that name; its columns are"
                f" {_quoted(columns)}"
            )


def _cast(value: Any, cast: Callable[[Any], Any], source: str) -> Any:
    if value is None:
        return None
    try:
        return cast(value)
    except _UNUSABLE as error:
        raise ValueError(f"column `{source}` {error}") from None


def _integer(value: Any) -> int:
    if isinstance(value, bool | int):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and _INTEGER.fullmatch(value.strip()):
        return int(value)
    raise ValueError(f"must be an integer, but is {value!r}")


def _number(value: Any) -> float:
    try:
        found = float(value) if isinstance(value, bool | int | float | str) else math.nan
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise ValueError(f"must be a number, but is {value!r}")
    return found


def _boolean(value: Any) -> bool:
    found = _BOOLEANS.get(str(value).strip().lower())
    if found is None:
        raise ValueError(f"must be true or false, but is {value!r}")
    return found


_CASTS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "text": ("string", text_of),
    "integer": ("int64", _integer),
    "number": ("float64", _number),
    "boolean": ("bool", _boolean),
}


def _looked_up(value: Any, table: Mapping[str, Any], source: str) -> Any:
    if value is None:
        return None
    whole = isinstance(value, float) and value.is_integer()  # a column with nulls holds 4.0 for 4
    for text in (text_of(value), *([str(int(value))] if whole else [])):
        if text in table:
            return table[text]
    names = listed(list(table), _MOST)
    raise ValueError(f"column `{source}` is {value!r}, which `values` does not have; it has {names}")


def _made_chat(templates: Sequence[tuple[str, Template]], row: Mapping[str, Any]) -> list[dict[str, str]]:
    texts = ((role, template.fill(row)) for role, template in templates)
    return [{"role": role, "content": text} for role, text in texts if text.strip()]


def _chat(chat: Any, keys: ChatKeys) -> list[dict[str, Any]] | None:
    if chat is None:
        return None
    chat = [chat] if isinstance(chat, dict) else chat
    if not isinstance(chat, list) or not all(isinstance(message, dict) for message in chat):
        raise ValueError(f"must be a list of messages, but is {chat!r:.80}")
    return [_message(message, keys, f"message {number}") for number, message in enumerate(chat, start=1)]


def _message(message: Mapping[str, Any], keys: ChatKeys, place: str) -> dict[str, Any]:
    """Return a message with the keys `role` and `content`, and with its further keys."""
    if keys.role not in message:
        raise ValueError(f"{place} has no `{keys.role}`; its keys are {listed(list(message), _MOST)}")
    rest = {key: value for key, value in message.items() if key not in (keys.role, keys.content)}
    role, content = message[keys.role], message.get(keys.content)
    role = keys.roles.get(role, role) if isinstance(role, str) else role
    if role == "tool_calls":
        return {"role": "assistant", "tool_calls": _calls(content, place), **rest}
    return {"role": role, "content": content, **rest}


def _calls(text: Any, place: str) -> list[dict[str, Any]]:
    """Return the tool calls of a text such as `{"name": ..., "arguments": {...}}`, or a list of them."""
    try:
        calls = json.loads(text) if isinstance(text, str) else text
    except ValueError:
        calls = None
    found = calls if isinstance(calls, list) else [calls]
    if not found or not all(isinstance(call, dict) and {"name", "function"} & call.keys() for call in found):
        raise ValueError(
            f'{place} must hold calls of tools as JSON ({{"name": ..., "arguments": ...}}), but is {text!r:.80}'
        )
    return [call if "function" in call else {"type": "function", "function": call} for call in found]


def holds_sharegpt(values: Sequence[Any]) -> bool:
    """Return whether the first chat of a column, a list or a message, has `from` and `value`."""
    chat = next((value for value in values if isinstance(value, list | dict) and value), None)
    first = chat[0] if isinstance(chat, list) else chat
    return isinstance(first, dict) and {"from", "value"} <= first.keys() and "role" not in first


def _shape(
    shape: str, wanted: Sequence[str], values: Mapping[str, Sequence[Any]], where: str, predicts: bool
) -> tuple[dict[str, Any], list[str]]:
    """Return the columns of a known shape, and notes; empty if the rows need no conversion.

    Raises:
        DataError: the recipe forces a shape that the rows do not have.
    """
    columns: dict[str, Any] = {}
    missing = [name for name in wanted if name not in values]
    if shape in ("auto", "sharegpt"):
        for name in wanted:
            source = _CONVERSATIONS if name in missing and name == _MESSAGES else name
            if source in values and holds_sharegpt(values[source]):
                columns[name] = MappedColumn(column=source, chat=_SHAREGPT)
            elif source in values and source != name:
                columns[name] = source
        if columns:
            return columns, [f"{_quoted(columns)} of {where}: chats in the shape of ShareGPT are read as messages"]
    needed = {"instruction"} if predicts else {"instruction", "output"}
    if shape in ("auto", "alpaca") and needed <= values.keys():
        columns = {name: mapped for name, mapped in _alpaca(values).items() if name in missing}
        if columns:
            notes = [f"{where} has the columns of Alpaca: {_quoted(columns)} are made from them"]
            if "history" in values:
                notes.append(f"column `history` of {where} is not read")
            return columns, notes
    if shape not in ("auto", "none"):
        raise DataError(
            f"`data.map.shape` is {shape}, but the rows of {where} have another shape: their columns are"
            f" {_quoted(values)}, and the task reads {_quoted(wanted)}; set `data.map.columns`"
        )
    return {}, []


def _quoted(names: Iterable[str]) -> str:
    return listed([f"`{name}`" for name in names], _MOST) or "none"


def _question(mapped: Mapped) -> Mapped:
    """Return a column without the answers at the end of chats that are made from columns."""
    if isinstance(mapped, str | MappedColumn):
        return mapped
    last = max((place for place, message in enumerate(mapped) if message.role != "assistant"), default=-1)
    return mapped[: last + 1]


def _alpaca(columns: Iterable[str]) -> dict[str, Any]:
    question = "{instruction}[\n{input}]" if "input" in columns else "{instruction}"
    system = [MadeMessage(role="system", content="[{system}]")] if "system" in columns else []
    return {
        _MESSAGES: [
            *system, MadeMessage(role="user", content=question), MadeMessage(role="assistant", content="{output}"),
        ],
        "prompt": question,
        "completion": "output",
    }  # fmt: skip
