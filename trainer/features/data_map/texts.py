"""The texts of `data.map`: templates over columns, and comparisons of a column with a value."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from trainer.base.text import number_in

_TOKEN = re.compile(r"\{\{|\}\}|\[\[|\]\]|\{(?P<column>[^{}]*)\}|[\[\]{}]|[^\[\]{}]+")
_ITEM = re.compile(r"(?P<column>.+)\[(?P<index>\d+)\](\.(?P<key>\w+))?")
_COMPARISON = re.compile(
    r'\s*(?P<column>"(?:[^"\\]|\\.)*"|\S.*?)\s*(?P<operator>==|!=|<=|>=|<|>|\bnot in\b|\bin\b)\s*(?P<value>\S.*?)\s*'
)
_ORDERS: Mapping[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge
}  # fmt: skip

_SAME_MARKS = {" ": "[ \u00a0\u202f]", "'": "['\u2019]"}
"""The characters that programs write for a mark: spaces without a line break, and the apostrophe of typography."""


def text_of(value: Any) -> str:
    """Return a scalar as text, as JSON writes it; a text stays as it is.

    Raises:
        ValueError: the value is null, a list or an object.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    raise ValueError(f"must be a text or a number, but is {_shown(value)}")


def _shown(value: Any) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


@dataclass(frozen=True)
class Marks:
    """The marks of numbers in texts: of decimals, and between groups of three digits."""

    decimal: str
    thousands: str

    @classmethod
    def of(cls, decimal: str, thousands: str | None) -> Marks:
        """Return the marks of a recipe that sets one of them; beside a decimal comma, points stand between groups."""
        return cls(decimal, thousands or ".")

    def plain(self, text: str) -> str:
        """Return a number such as "1.234,5" with a decimal point alone.

        Raises:
            ValueError: it is no such number.
        """
        between = _SAME_MARKS.get(self.thousands, re.escape(self.thousands))
        form = rf"\s*[+-]?([0-9]{{1,3}}({between}[0-9]{{3}})+|[0-9]+)({re.escape(self.decimal)}[0-9]+)?\s*"
        if re.fullmatch(form, text) is None:
            comma = "a decimal comma" if self.decimal == "," else f"{self.thousands!r} between groups of three digits"
            raise ValueError(f"must be a number with {comma}, but is {text!r}")
        return re.sub(between, "", text.strip()).replace(self.decimal, ".")


@dataclass(frozen=True)
class _Read:
    """A column in braces: its value, an item of its list, or a test whether it has a text.

    Attributes:
        test: whether the part is kept with a text (True) or without (False); None: the value is written.
        index: the item of a list; None: the value is no list.
        key: the key in an item that is an object.
    """

    column: str
    test: bool | None = None
    index: int | None = None
    key: str | None = None

    @classmethod
    def parse(cls, text: str) -> _Read:
        if text[0] in "?!":
            return cls(text[1:], test=text[0] == "?")
        item = _ITEM.fullmatch(text)
        return cls(text) if item is None else cls(item["column"], None, int(item["index"]), item["key"])

    def value(self, row: Mapping[str, Any]) -> Any:
        """Return the value in a row.

        Raises:
            ValueError: it is not there.
        """
        value = row[self.column]
        if self.index is None or value is None:
            return value
        try:
            value = value[self.index]
            return value if self.key is None else value[self.key]
        except (IndexError, KeyError, TypeError):
            item = f"[{self.index}]" + (f".{self.key}" if self.key else "")
            raise ValueError(f"column `{self.column}` has no {item}") from None

    def has_text(self, row: Mapping[str, Any]) -> bool:
        value = self.value(row)
        return value is not None and bool(str(value).strip())


@dataclass(frozen=True)
class Template:
    """A text with columns in braces; a part in brackets is left out if one of its columns is null or blank.

    `{?column}` and `{!column}` write nothing. A part with them is kept if these columns have a text, or have none; its
    other columns do not count then. `{column[1].key}` is the key of the second item of a list.

    Attributes:
        parts: whether each part is optional, and its pieces: texts, or columns.
    """

    parts: tuple[tuple[bool, tuple[str | _Read, ...]], ...]

    @classmethod
    def parse(cls, text: str) -> Template:
        """Read a template, in which `{{`, `}}`, `[[` and `]]` are the characters themselves.

        Raises:
            ValueError: a brace or bracket has no partner, or an optional part has no column or is within another one.
        """
        parts: list[tuple[bool, tuple[str | _Read, ...]]] = []
        pieces: list[str | _Read] = []
        is_optional = False
        for match in _TOKEN.finditer(text):
            token, column = match[0], match["column"]
            if column is not None:
                if not column.strip("?!"):
                    raise ValueError(
                        f"has `{token}` without a column; write `{{column}}`, or `{{{token}}}` for the characters"
                    )
                read = _Read.parse(column)
                pieces.append(read)
                if read.test is not None and not is_optional:
                    raise ValueError(f"has `{token}` outside of an optional part; write `[{token}...]`")
            elif token in "{}":
                raise ValueError(f"has a single `{token}`; write `{token * 2}` for the character")
            elif token == ("]" if is_optional else "["):
                if is_optional and not any(isinstance(piece, _Read) for piece in pieces):
                    raise ValueError("has an optional part without a column; write `[[` and `]]` for brackets")
                parts.append((is_optional, tuple(pieces)))
                pieces, is_optional = [], not is_optional
            elif token in "[]":
                fault = "an optional part within another one" if is_optional else "a single `]`"
                raise ValueError(f"has {fault}; write `[[` and `]]` for brackets")
            else:
                pieces.append(token[0] if token in ("{{", "}}", "[[", "]]") else token)
        if is_optional:
            raise ValueError("has a `[` without `]`; write `[[` for a bracket")
        return cls((*parts, (False, tuple(pieces))))

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns, each once."""
        reads = (piece for _, pieces in self.parts for piece in pieces if isinstance(piece, _Read))
        return tuple(dict.fromkeys(read.column for read in reads))

    def fill(self, row: Mapping[str, Any]) -> str:
        """Return the text for a row.

        Raises:
            ValueError: a column outside of optional parts is null, or one is a list or an object.
        """
        return "".join(self._filled(row))

    def _filled(self, row: Mapping[str, Any]) -> Iterator[str]:
        for is_optional, pieces in self.parts:
            reads = [piece for piece in pieces if isinstance(piece, _Read)]
            tests = [read for read in reads if read.test is not None]
            if is_optional and any(read.has_text(row) == (read.test is False) for read in tests or reads):
                continue
            for piece in pieces:
                if isinstance(piece, str):
                    yield piece
                elif piece.test is None:
                    yield _written(piece, row)


def _written(read: _Read, row: Mapping[str, Any]) -> str:
    value = read.value(row)
    try:
        return text_of(value)
    except ValueError as error:
        optional = "; put it into an optional part `[...]`" if value is None else ""
        raise ValueError(f"column `{read.column}` {error}{optional}") from None


def _instead(column: str, name: str, text: str) -> str:
    """Return the value that an operator needs, with an example made of a text such as `[a, b]`."""
    items = [json.dumps(part.strip(" '\"")) for part in text.strip("[](){} ").split(",") if part.strip(" '\"")]
    if name.endswith("in"):
        return f"a list in JSON, such as {column} {name} [{', '.join(items or ['1', '2'])}]"
    return f"one value; for several ones write {column} {'in' if name == '==' else 'not in'} [{', '.join(items)}]"


@dataclass(frozen=True)
class Comparison:
    """A condition on a column, such as `score >= 0.5`; null fulfils no order."""

    column: str
    operator: str
    value: Any

    @classmethod
    def parse(cls, text: str) -> Comparison:
        """Read a condition; its value is JSON, or else a text. A column in double quotes is JSON too.

        Raises:
            ValueError: the text has another form.
        """
        match = _COMPARISON.fullmatch(text)
        if match is None:
            raise ValueError(
                'must compare a column with a value by ==, !=, <, <=, >, >=, in or not in ("score >= 0.5")'
            )
        try:
            value = json.loads(match["value"])
        except ValueError:
            value = match["value"]
        name = match["operator"]
        if name in _ORDERS and (isinstance(value, bool) or not isinstance(value, str | int | float)):
            raise ValueError(f"must compare by {name} with a number or a text, but the value is {match['value']}")
        if name.endswith("in") != isinstance(value, list) or isinstance(value, dict):
            raise ValueError(f"must compare by {name} with {_instead(match['column'], name, match['value'])}")
        column = match["column"]
        if column.startswith('"'):
            with suppress(ValueError):
                column = str(json.loads(column))
        return cls(column, name, value)

    @classmethod
    def unequal(cls, column: str, value: Any) -> str:
        """Return the condition that a column has another value."""
        text = f"{column} != {json.dumps(value, ensure_ascii=False)}"
        found = _COMPARISON.fullmatch(text)
        # A name that the pattern would divide, such as one with an operator in it, is written as JSON.
        return text if found and found["column"] == column else f"{json.dumps(column)}{text.removeprefix(column)}"

    def holds(self, value: Any) -> bool:
        """Return whether a value of the column fulfils the condition.

        Raises:
            ValueError: the value has another type.
        """
        if self.operator.endswith("in"):
            return any(self._is(value, one) for one in self.value) == (self.operator == "in")
        if self.operator in _ORDERS:
            return value is not None and _ORDERS[self.operator](self._as(self.value, value), self.value)
        return self._is(value, self.value) == (self.operator == "==")

    def _is(self, value: Any, other: Any) -> bool:
        return value is other if value is None or other is None else bool(self._as(other, value) == other)

    def _as(self, other: Any, value: Any) -> Any:
        """Return a value of the column as one of the type of the other value; a text may be a number."""
        if isinstance(value, str) and isinstance(other, int | float) and not isinstance(other, bool):
            number = number_in(value)
            value = value if number is None else number
        kinds = [
            "a boolean" if isinstance(one, bool) else "a number" if isinstance(one, int | float) else
            "a text" if isinstance(one, str) else "a list or an object"
            for one in (value, other)
        ]  # fmt: skip
        if kinds[0] != kinds[1]:
            raise ValueError(f"is {_shown(value)}, {kinds[0]}, and is compared with {_shown(other)}, {kinds[1]}")
        return value
