"""Parser of recipes in JSON; the tree has the file, line and column of every key and value.

The language is JSON (RFC 8259) with `//` and `/* */` comments and trailing commas. The standard library's parser gives
no positions, and no maintained library supports positions, comments and duplicate keys together.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainer.base.errors import RecipeError
from trainer.recipe.paths import KeyPath, dotted, shortened

MAX_DEPTH = 64  # far below Python's recursion limit
MAX_NUMBER_LENGTH = 100
TOO_DEEP = f"nested deeper than the limit of {MAX_DEPTH} levels"


@dataclass(frozen=True)
class Origin:
    """Where a value was written: a position in a file, the command line, or `DEFAULT`."""

    source: str
    line: int = 0  # from 1; 0 if the source has no lines
    column: int = 0  # from 1, in characters
    folder: Path = Path()  # base of relative paths

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source


DEFAULT = Origin("default")


@dataclass(frozen=True)
class Problem:
    """An error of the user, and its place."""

    origin: Origin
    text: str

    def __str__(self) -> str:
        return f"{self.origin}: {self.text}"


@dataclass(frozen=True)
class Node:
    """A JSON value with its place; objects and lists contain nodes."""

    value: bool | int | float | str | list[Node] | dict[str, Node] | None
    origin: Origin
    key_origin: Origin | None = None  # of the key, for members of an object

    @property
    def members(self) -> dict[str, Node]:
        """The members of an object; empty for other values."""
        return self.value if isinstance(self.value, dict) else {}

    def plain(self) -> Any:
        """Return the value without places, as `json.loads` would."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value


class Reading:
    """The reading of one text: its origin, and the problems after which it could continue."""

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        self.problems: list[Problem] = []

    def at(self, line: int, column: int) -> Origin:
        """Return a place of the text; line and column count from 1."""
        return replace(self.origin, line=line, column=column)

    def report(self, path: KeyPath, place: Origin, text: str) -> None:
        """Add the problem of the value at a path; `text` follows its name."""
        self.problems.append(Problem(place, f"`{dotted(path)}` {text}" if path else f"the recipe {text}"))

    def key(self, members: Mapping[str, Node], key: str, path: KeyPath, place: Origin) -> None:
        """Report a key that its object has already; `path` ends with it."""
        if key in members:
            self.report(path, place, f"is a duplicate key in one object; first at {members[key].key_origin}")

    def usable(self, text: str, path: KeyPath, place: Origin) -> str:
        """Return a text in characters that can be encoded, and report others."""
        if (problem := unusable_text(text)) is not None:
            self.report(path, place, f"holds {shortened(json.dumps(text))}, which {problem}")
        return printable(text)


def parse(text: str, origin: Origin, path: KeyPath = (), places: bool = True) -> tuple[Node, list[Problem]]:
    """Return the tree of `text`, and its duplicate keys and invalid values.

    Args:
        path: The path of the value in the recipe.
        places: Whether nodes have lines and columns; if not, the origin of every node is `origin`.

    Raises:
        RecipeError: the text is not JSON with comments, or is nested too deeply.
    """
    parser = _Parser(text, origin, path, places)
    return parser.document(), parser.problems


# The grammar backtracks over at most one token, so that any text takes linear time.
_TOKEN = re.compile(
    r"""
      (?P<space>   [ \t\r\n]+ | //[^\n]* | /\*(?s:.*?)\*/ )
    | (?P<string>  "[^"\\\x00-\x1f]*(?:\\.[^"\\\x00-\x1f]*)*" )
    | (?P<number>  -?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)? (?![\w.]) )
    | (?P<word>    -?[A-Za-z_]\w* )
    | (?P<mark>    [{}\[\]:,] )
    """,
    re.VERBOSE,
)
_WORDS: dict[str, bool | float | None] = {
    "null": None,
    "true": True,
    "false": False,
    "NaN": math.nan,  # not JSON, but Python and JavaScript write it; parsed, then reported by name
    "Infinity": math.inf,
    "-Infinity": -math.inf,
}
_PYTHON_WORDS = {"None": "null", "True": "true", "False": "false"}


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    start: int


class _Parser(Reading):
    """Recursive descent with one token of lookahead."""

    def __init__(self, text: str, origin: Origin, path: KeyPath, places: bool) -> None:
        super().__init__(origin)
        self._text = text
        self._line_starts = [0, *(match.end() for match in re.finditer("\n", text))]
        self._path = list(path)  # of the current value
        self._places = places
        self._tokens = self._scan()
        self._token = next(self._tokens)

    def document(self) -> Node:
        if self._token.kind == "end":
            raise self._error(0, "empty")
        node = self._value()
        if self._token.kind != "end":
            raise self._expected("the end of the file")
        return node

    def _scan(self) -> Iterator[_Token]:
        position = 0
        while position < len(self._text):
            match = _TOKEN.match(self._text, position)
            if match is None:
                raise self._error(position, _unreadable(self._text, position))
            if match.lastgroup != "space":
                yield _Token(match.lastgroup or "", match.group(), position)
            position = match.end()
        yield _Token("end", "", position)

    def _advance(self) -> _Token:
        token = self._token
        self._token = next(self._tokens, token)  # the end token stays
        return token

    def _take(self, mark: str) -> bool:
        taken = self._token.text == mark
        if taken:
            self._advance()
        return taken

    def _value(self, key_origin: Origin | None = None) -> Node:
        start = self._token.start
        # Before the descent, so that no text reaches Python's recursion limit.
        if len(self._path) >= MAX_DEPTH:
            raise self._error(start, TOO_DEEP)
        value: Any
        if self._take("{"):
            value = self._object()
        elif self._take("["):
            value = self._list()
        else:
            value = self._scalar()
        return Node(value, self._place(start), key_origin)

    def _object(self) -> dict[str, Node]:
        members: dict[str, Node] = {}
        while not self._take("}"):
            if self._token.kind != "string":
                raise self._expected('a key in double quotes or "}"')
            token = self._advance()
            key, place = self._string(token), self._place(token.start)
            if not self._take(":"):
                raise self._expected('":" after the key')
            self._path.append(key)
            self.key(members, key, tuple(self._path), place)
            # The first of equal keys stays; the value of the second one is parsed to go on behind it.
            members.setdefault(key, self._value(key_origin=place))
            self._path.pop()
            if not self._take(",") and self._token.text != "}":
                raise self._expected('"," or "}" after the value')
        return members

    def _list(self) -> list[Node]:
        items: list[Node] = []
        while not self._take("]"):
            self._path.append(len(items))
            items.append(self._value())
            self._path.pop()
            if not self._take(",") and self._token.text != "]":
                raise self._expected('"," or "]" after the value')
        return items

    def _scalar(self) -> bool | int | float | str | None:
        token = self._token
        if token.kind == "string":
            return self._string(self._advance())
        if token.kind == "number":
            return self._number(self._advance())
        if token.kind == "word" and token.text in _WORDS:
            value = _WORDS[self._advance().text]
            if isinstance(value, float):
                self._not_finite(token)
            return value
        remedy = _PYTHON_WORDS.get(token.text)
        raise self._expected("a value" + (f' (JSON writes "{remedy}")' if remedy else ""))

    def _number(self, token: _Token) -> int | float:
        # Python reads an integer in a time that grows with the square of its digits.
        if len(token.text) > MAX_NUMBER_LENGTH:
            raise self._error(token.start, f"a number of more than {MAX_NUMBER_LENGTH} characters")
        number: int | float = json.loads(token.text)
        if not math.isfinite(number):
            self._not_finite(token)
        return number

    def _string(self, token: _Token) -> str:
        try:
            text: str = json.loads(token.text)
        except json.JSONDecodeError as error:
            raise self._error(token.start + error.pos, f"{error.msg} in a string") from error
        return self.usable(text, tuple(self._path), self._place(token.start))

    def _not_finite(self, token: _Token) -> None:
        self.report(tuple(self._path), self._place(token.start), not_finite(token.text))

    def _place(self, position: int) -> Origin:
        if not self._places:
            return self.origin
        line = bisect_right(self._line_starts, position)
        return self.at(line, position - self._line_starts[line - 1] + 1)

    def _error(self, position: int, text: str) -> RecipeError:
        return RecipeError(str(Problem(self._place(position), text)))

    def _expected(self, expected: str) -> RecipeError:
        if self._token.kind == "end":
            return self._error(self._token.start, f"expected {expected}, found the end of the text")
        return self._error(self._token.start, f"expected {expected}, found `{shortened(self._token.text)}`")


def not_finite(text: str) -> str:
    return f"must be a finite number, but is {text}"


def unusable_text(text: str) -> str | None:
    """Return the problem of a string that JSON allows but file systems and terminals do not; None if it is valid."""
    if "\0" in text:
        return "contains the character U+0000"
    if printable(text) != text:
        return "is not valid Unicode (unpaired surrogate)"
    return None


def printable(text: str) -> str:
    """Replace unpaired surrogates, which cannot be encoded, by question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _unreadable(text: str, position: int) -> str:
    rest = text[position : position + MAX_NUMBER_LENGTH]
    if rest[0] == '"':
        return "a string without a closing quote on the same line"
    if rest.startswith("/*"):
        return "a comment without a closing */"
    if rest[0] == "'":
        return "strings need double quotes, not single quotes"
    number = re.match(r"[-+.0-9][-+.\w]*", rest)
    if number:
        return f"{shortened(number.group())} is not a JSON number (such as 0.5, 20, 2e-5)"
    return f"unexpected character {json.dumps(rest[0])}"
