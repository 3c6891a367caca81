"""The columns that `data.map` makes from those of a source: a function from rows to rows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Self, TypeAlias

from trainer.base.errors import DataError
from trainer.base.nulls import given
from trainer.base.text import blanks_hint, listed, number_in
from trainer.data.formats.base import CellKind, json_chats
from trainer.features.data_map.section import ChatKeys, DataMap, FlagColumns, MadeMessage, MappedColumn, is_template
from trainer.features.data_map.shapes import SYSTEM, Mapped, columns_of_shape
from trainer.features.data_map.texts import Comparison, Marks, Template, text_of

Columns: TypeAlias = Mapping[str, Sequence[Any]]
"""A batch of rows, by column."""

_UNUSABLE = (ValueError, OverflowError, RecursionError)
"""Errors of values of a source that a map cannot use: wrong, too large for a number, or nested too deeply."""

_LARGEST_INTEGER = (1 << 63) - 1
_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_MOST = 10  # columns and values in a message


@dataclass(frozen=True)
class RowMap:
    """A map from the rows of a source to those of the task.

    Attributes:
        keeps_others: whether the other columns of the source stay.
    """

    columns: Mapping[str, Mapped]
    conditions: tuple[Comparison, ...] = ()
    keeps_others: bool = False
    notes: tuple[str, ...] = ()
    key: str = "data.map"

    @property
    def _makers(self) -> Mapping[str, _Maker]:
        return {name: _maker(mapped) for name, mapped in self.columns.items()}

    @classmethod
    def of(
        cls,
        section: DataMap,
        wanted: Sequence[str],
        values: Mapping[str, Sequence[Any]],
        where: str,
        key: str = "data.map",
        predicts: bool = False,
    ) -> Self | None:
        """Return the map of a source; None if it leaves the rows as they are.

        Args:
            values: the columns of the source, with the first values of those that may hold chats.
            predicts: whether the map is of all rows, without the last answers of chats and columns that are not wanted.

        Raises:
            DataError: a column is missing.
        """
        notes: list[str] = []
        columns: Mapping[str, Mapped] = section.columns or {}
        if section.columns is None:
            columns, note = columns_of_shape(section.shape, wanted, values, predicts)
            if columns:
                read = {*wanted, "tools", *cls(columns).sources}  # tasks have a note of their own on tools
                unread = [name for name in values if name not in read and not predicts]
                notes = [f"{_quoted(columns)} of {where}: {note}"]
                notes += [f"columns of {where} that are not read: {_quoted(unread)}"] if unread else []
            if not columns and section.shape not in ("auto", "none"):
                raise DataError(
                    f"`{key}.shape` is {section.shape}, but the rows of {where} have another shape: their columns are"
                    f" {_quoted(values)}, and the task reads {_quoted(wanted)}; set `{key}.columns`"
                )
        if predicts:
            columns = {name: _question(mapped) for name, mapped in columns.items() if name in wanted}
        conditions = () if predicts else tuple(map(Comparison.parse, section.where))
        found = cls(columns, conditions, section.columns is None, tuple(notes), key)
        if section.columns is None and not columns and not conditions:
            return None
        for name, maker in found._makers.items():
            _require(maker.sources, values, f"{key}.columns.{name}", where)
        _require([condition.column for condition in conditions], values, f"{key}.where", where)
        return found

    @classmethod
    def of_input(
        cls, section: DataMap, wanted: Sequence[str], rows: Sequence[Mapping[str, Any]], where: str
    ) -> Self | None:
        """Return the map of a file to predict, given its first rows; see `of`."""
        names = dict.fromkeys(name for row in rows for name in row)
        return cls.of(section, wanted, {name: [row.get(name) for row in rows] for name in names}, where, predicts=True)

    def keeps_column(self, name: str) -> bool:
        """Return whether a column of the source stays; that of systems becomes a part of the chats."""
        return self.keeps_others and name not in self.columns and (name != SYSTEM or name not in self.sources)

    @property
    def renamed(self) -> dict[str, str]:
        """The columns of the source with values that stay as they are, by their new names."""
        return {name: maker.sources[0] for name, maker in self._makers.items() if maker.make is None}

    @property
    def made(self) -> RowMap:
        """The map of the other columns alone."""
        renamed = self.renamed
        return RowMap({name: mapped for name, mapped in self.columns.items() if name not in renamed}, key=self.key)

    @property
    def sources(self) -> tuple[str, ...]:
        """The columns of the source that are read, each once."""
        return tuple(dict.fromkeys(source for maker in self._makers.values() for source in maker.sources))

    def features(self, features: Mapping[str, Any]) -> dict[str, Any]:
        """Return the types of the mapped columns, given those of the source."""
        kept = {name: feature for name, feature in features.items() if self.keeps_column(name)}
        return {**kept, **{name: maker.feature(features) for name, maker in self._makers.items()}}

    def keeps(self, rows: Columns, numbers: Sequence[int], where: str) -> list[int]:
        """Return the places in a batch of the rows that fulfil all conditions.

        Args:
            numbers: the index of each row in the source, for messages.

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
                        f"`{self.key}.where`: column `{condition.column}`, row {number + 1} of {where} {error}; correct"
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
        found = {name: values for name, values in rows.items() if self.keeps_column(name)}
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
                        f"`{self.key}.columns.{name}`, row {number + 1} of {where}: {error}; correct the value, or"
                        f" leave the row out by `{self.key}.where`"
                    ) from None
            found[name] = values
        return found


def kinds_of_sources(
    section: DataMap, kinds: Mapping[str, CellKind], known: Mapping[str, CellKind]
) -> dict[str, CellKind]:
    """Return further kinds of the columns of a CSV file, given those of the columns that the task reads."""
    found: dict[str, CellKind] = {}
    for name, mapped in (section.columns or {}).items():
        maker = _maker(mapped)
        kind = "text" if maker.make is not None else kinds.get(name)
        found |= dict.fromkeys(maker.sources, kind) if kind else {}
    for condition in map(Comparison.parse, section.where):
        values = condition.value if isinstance(condition.value, list) else [condition.value]
        if all(isinstance(value, str) for value in values):
            found.setdefault(condition.column, known.get(condition.column, "text"))
    return found


def fix_of_row(section: DataMap, column: str, value: Any) -> str | None:
    """Return how `data.map` leaves out the rows with a value of a mapped column; None: by no condition.

    Args:
        value: null, NaN, a blank text, or a text where others are numbers.
    """
    source = column
    if section.columns is not None:
        maker = _maker(section.columns[column])
        if len(maker.sources) != 1 or (maker.make is not None and value is not None):
            return None
        source = maker.sources[0]
    # NaN is not less than any number.
    condition = f"{source} < Infinity" if isinstance(value, float) else Comparison.unequal(source, value)
    lines = json.dumps([*section.where, condition], ensure_ascii=False)
    return f"to leave such rows out, set `data.map.where` to {lines}"


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
    if isinstance(mapped, FlagColumns):
        return _flagged(mapped)
    if not isinstance(mapped, MappedColumn):
        parts = [_part(message) for message in mapped]
        sources = tuple(dict.fromkeys(column for columns, _ in parts for column in columns))
        return _Maker(sources, lambda _: json_chats(), lambda row: [one for _, make in parts for one in make(row)])
    source = mapped.column
    if (keys := mapped.chat) is not None:
        beside = () if keys.system is None else (keys.system,)
        return _Maker((source, *beside), lambda _: json_chats(), lambda row: _chat(row[source], keys, row))
    if (table := mapped.values) is not None:
        # `MappedColumn.problem` refuses values of several types, so the first one has the type of all.
        kind = {str: "string", bool: "bool", int: "int64", float: "float64"}[type(next(iter(table.values())))]
        return _Maker((source,), _values(kind), lambda row: _looked_up(row[source], table, source))
    if mapped.type is None:
        return _Maker((source,), lambda features: features[source])
    kind, cast = _CASTS[mapped.type]
    if (mapped.decimal, mapped.thousands) != (".", None):
        marks = Marks.of(mapped.decimal, mapped.thousands)
        return _Maker((source,), _values(kind), lambda row: _cast(row[source], lambda one: _marked(one, marks), source))
    return _Maker((source,), _values(kind), lambda row: _cast(row[source], cast, source))


def _flagged(mapped: FlagColumns) -> _Maker:
    """Return the maker of the names of columns that are 1."""

    def names(row: Mapping[str, Any]) -> list[str]:
        return [name for name in mapped.flags if _flag(row[name], name)]

    def name(row: Mapping[str, Any]) -> str:
        found = names(row)
        if len(found) != 1:
            problem = f"are all 0, of {_quoted(mapped.flags)}" if not found else f"are 1: {_quoted(found)}"
            raise ValueError(f"columns {problem}; `exactly_one` needs one that is 1, and `task.multi_label` does not")
        return found[0]

    def several(_: Mapping[str, Any]) -> Any:
        import datasets

        return datasets.List(datasets.Value("string"))

    sources = tuple(mapped.flags)
    return _Maker(sources, _values("string"), name) if mapped.exactly_one else _Maker(sources, several, names)


def _flag(value: Any, source: str) -> bool:
    try:
        # The text of a float is "1.0", which `_boolean` does not know.
        return _boolean(int(value) if isinstance(value, float | Decimal) and value in (0, 1) else value)
    except ValueError:
        raise ValueError(f"column `{source}` must be 0 or 1, but is {value!r}") from None


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
                f" {_quoted(columns)}{blanks_hint(name, columns)}"
            )


def _cast(value: Any, cast: Callable[[Any], Any], source: str) -> Any:
    if value is None:
        return None
    try:
        return cast(value)
    except _UNUSABLE as error:
        raise ValueError(f"column `{source}` {error}") from None


def _integer(value: Any) -> int:
    number = number_in(value) if isinstance(value, str) else value
    if isinstance(number, Decimal) and number == number.to_integral_value():
        number = int(number)
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    # Integers of Arrow have 64 bits.
    if isinstance(number, int) and abs(number) <= _LARGEST_INTEGER:  # true and false are integers too
        return int(number)
    raise ValueError(f"must be an integer, but is {value!r}")


def _number(value: Any) -> float:
    found = number_in(value) if isinstance(value, str) else value
    if not isinstance(found, int | float | Decimal) or not math.isfinite(found):
        raise ValueError(f"must be a number, but is {value!r}")
    return float(found)


def _marked(value: Any, marks: Marks) -> float:
    return _number(marks.plain(value) if isinstance(value, str) else value)


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
    texts = [text_of(value)]
    number = number_in(value) if isinstance(value, str) else value
    if isinstance(number, float) and math.isfinite(number):
        # A class such as 1 may be "1" or "1.0" in the source.
        texts += [text_of(number), *([str(int(number))] if number.is_integer() else [])]
    # Python and spreadsheets write booleans like this, and JSON in lower case.
    if texts[0] in ("True", "TRUE", "False", "FALSE"):
        texts.append(texts[0].lower())
    if text := next((text for text in texts if text in table), None):
        return table[text]
    names = listed(list(table), _MOST)
    raise ValueError(f"column `{source}` is {value!r}, which `values` does not have; it has {names}")


def _part(message: MadeMessage) -> tuple[tuple[str, ...], Callable[[Mapping[str, Any]], list[Any]]]:
    """Return the columns that a part of a chat reads, and the function from a row to its messages."""
    if message.role == "turns":
        return (message.content,), lambda row: _turns(row[message.content], message.content)
    template = Template.parse(message.content)

    def make(row: Mapping[str, Any]) -> list[Any]:
        text = template.fill(row)
        return [{"role": message.role, "content": text}] if text.strip() else []

    return template.columns, make


def _turns(pairs: Any, source: str) -> list[dict[str, str]]:
    if not isinstance(pairs, list | None) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs or []):
        raise ValueError(
            f"column `{source}` must be a list of pairs of a question and its answer, but is {pairs!r:.80}"
        )
    roles = ("user", "assistant")
    return [
        {"role": role, "content": text_of(text)} for pair in pairs or [] for role, text in zip(roles, pair, strict=True)
    ]


def _chat(chat: Any, keys: ChatKeys, row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    if chat is None:
        return None
    chat = [chat] if isinstance(chat, dict) else chat
    if not isinstance(chat, list) or not all(isinstance(message, dict) for message in chat):
        raise ValueError(f"must be a list of messages, but is {chat!r:.80}")
    found = [_message(message, keys, f"message {number}") for number, message in enumerate(chat, start=1)]
    system = None if keys.system is None else row[keys.system]
    if found and found[0]["role"] != "system" and system is not None and (text := text_of(system)).strip():
        return [{"role": "system", "content": text}, *found]
    return found


def _message(message: Mapping[str, Any], keys: ChatKeys, place: str) -> dict[str, Any]:
    """Return a message with the keys `role` and `content`, and with its further keys."""
    if keys.role not in message:
        raise ValueError(f"{place} has no `{keys.role}`; its keys are {listed(list(message), _MOST)}")
    rest = {key: value for key, value in message.items() if key not in (keys.role, keys.content, *keys.drop)}
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
    # The form of OpenAI, which chat templates read.
    return [call if "function" in call else {"type": "function", "function": call} for call in found]


def _quoted(names: Iterable[str]) -> str:
    return listed([f"`{name}`" for name in names], _MOST) or "none"


def _question(mapped: Mapped) -> Mapped:
    """Return a column without the answers at the end of chats that are made from columns."""
    if isinstance(mapped, str | MappedColumn | FlagColumns):
        return mapped
    # The prompt ends with the last message that is no answer.
    last = max((place for place, message in enumerate(mapped) if message.role != "assistant"), default=-1)
    return mapped[: last + 1]
