"""The columns of a data set: the kind and the distinct values of each."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time
from decimal import Decimal
from functools import cached_property
from typing import Any, Literal

from trainer.base.text import LITERAL, number_in

Kind = Literal[
    "text", "integer", "number", "boolean", "date", "image", "texts", "numbers", "chat", "objects", "object", "empty"
]

_TYPES: tuple[tuple[type | tuple[type, ...], Kind], ...] = (
    (bool, "boolean"), (int, "integer"), (float, "number"), (str, "text"), ((date, time), "date"),
)  # fmt: skip
_ITEMS: dict[Kind, Kind] = {"text": "texts", "integer": "numbers", "number": "numbers", "boolean": "numbers"}
IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
_ROLES, _CONTENTS = {"role", "from"}, {"content", "value"}


@dataclass(frozen=True)
class Column:
    """A column of the first rows.

    `cells` has all values. `values` has those that are not null, as numbers if `mapped` reads them so. `names` are the
    classes that the data set declares, in order. `mapped` has the keys of `data.map.columns` that read texts or
    decimals as numbers; None: the column is read as it is. `missing` has blank texts and, in a column of numbers, texts
    such as "n/a"; `values` has none of them.
    """

    name: str
    kind: Kind
    values: Sequence[Any]
    names: Sequence[str] = ()
    cells: Sequence[Any] = ()
    mapped: Mapping[str, Any] | None = None
    missing: Sequence[str] = ()

    @cached_property
    def distinct(self) -> list[Any]:
        """The distinct values of a column of scalars, sorted; empty for other columns."""
        return sorted(set(self.values)) if self.kind in SCALARS else []

    @property
    def repeats(self) -> bool:
        """Whether most values stand in several rows; of a few rows, whether one does."""
        return len(self.distinct) <= max(len(self.values) / 2, min(len(self.values) - 1, 10))

    @cached_property
    def characters(self) -> float:
        """The mean length of texts; 0 for other columns."""
        return sum(map(len, self.values)) / max(len(self.values), 1) if self.kind == "text" else 0.0

    @cached_property
    def words(self) -> frozenset[str]:
        """The words of the name in lower case: `Sentiment (manual)`, `user_id`, `ItemID`."""
        apart = re.sub(r"(?<=[^\W\d_A-Z])(?=[A-Z])", " ", self.name)
        return frozenset(re.findall(r"[^\W\d_]+", apart.casefold()))

    @cached_property
    def identifies(self) -> bool:
        """Whether each text is a word of its own with a digit, such as the hexadecimal number of a row."""
        return (
            self.kind == "text"
            and len(self.distinct) == len(self.values) > 1
            and all(len(text) >= _FEWEST_OF_IDENTIFIER and _IDENTIFIER.fullmatch(text) for text in self.values)
        )

    @property
    def may_have_decimals(self) -> bool:
        """Whether commas that are read as separators of thousands may be decimal ones: 1,137."""
        is_grouped = self.mapped == {"type": "number", "thousands": ","}
        return is_grouped and all(_ONE_GROUP.fullmatch(text.strip()) for text in self.cells if isinstance(text, str))

    @property
    def is_flag(self) -> bool:
        """Whether all values are 0 or 1, or false or true."""
        is_number = self.kind in ("integer", "boolean", "number")
        return is_number and not self.names and bool(self.values) and set(self.values) <= {0, 1}

    @cached_property
    def numbers_rows(self) -> bool:
        """Whether integers count the rows, from any number on."""
        first = self.values[0] if self.kind == "integer" and len(self.values) > 1 else None
        return first is not None and list(self.values) == list(range(first, first + len(self.values)))

    @cached_property
    def notation(self) -> str | None:
        """The kind of texts that are numbers, dates, addresses or lists in a form that is not read as such."""
        texts = [text for value in self.values if (text := value.strip())] if self.kind == "text" else []
        others = [text for text in texts if number_in(text) is None]
        if not others:
            return None
        others = [text for text in others if not _FIGURE.fullmatch(text)] or others
        if len(others) <= len(texts) / 10:
            return f"numbers, but {json.dumps(others[0], ensure_ascii=False)} in {len(others):,} of {len(texts):,} rows"
        return next((name for name, form in _NOTATIONS.items() if all(map(form.fullmatch, texts))), None)

    @property
    def shown(self) -> str:
        """The name and the kind, for messages."""
        kind = "values of several types" if self.kind == "object" and len({*map(type, self.values)}) > 1 else self.kind
        classes = f"{len(self.names)} classes" if self.names else self.notation or kind
        distinct = f", {len(self.distinct):,} distinct" if self.distinct and not self.names else ""
        return f"{self.name} ({classes}{distinct})"


SCALARS: tuple[Kind, ...] = ("text", "integer", "number", "boolean")
_FIGURES = r"[+-]?(\d+|\d{1,3}([.,' ]\d{3})+)([.,]\d+)?"
_FIGURE = re.compile(_FIGURES)
_MONEY = "[$€£¥₹]|EUR|USD|GBP|CHF"
DATES, ADDRESSES, LISTS = "dates", "addresses or identifiers", "lists or objects written as texts"
_NOTATIONS = {
    DATES: re.compile(r"\d{4}([-/.]\d{1,2}){2}([T ]\d.*)?|\d{1,2}([-/.]\d{1,2})[-/.]\d{2,4}( \d.*)?"),
    "percentages": re.compile(rf"{_FIGURES} ?%"),
    "amounts of money": re.compile(rf"({_MONEY}) ?{_FIGURES}|{_FIGURES} ?({_MONEY})"),
    "numbers with separators of thousands, or with a decimal comma": re.compile(_FIGURES),
    ADDRESSES: re.compile(r"@\w+|\S+@\S+\.\w+|\w+://\S+|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE),
    LISTS: LITERAL,
}
_IDENTIFIER, _FEWEST_OF_IDENTIFIER = re.compile(r"(?=.*\d)[\w.:/-]+"), 4
_ONE_GROUP = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})?|0")
_MISSING = frozenset((
    "", "n/a", "n.a.", "n. a.", "na", "#n/a", "nan", "null", "none", "nil", "-", "--", "?", "missing", "unknown",
    "k.a.", "k. a.", "keine angabe", "#nv", "n.v.", "n. v.", "n/d", "n.d.", "s/d", "nd", "nc",
))  # fmt: skip
"""Texts beside numbers that stand for no number, in small letters."""
_MARKS = ((",", "."), (".", ","), (".", " "), (",", " "), (".", "'"))
"""Decimal marks, and marks of thousands."""


def columns_of(rows: Any, most: int) -> list[Column]:
    """Return the columns of the first rows of a `datasets.Dataset`."""
    images = [name for name, feature in rows.features.items() if type(feature).__name__ == "Image"]
    read = rows.remove_columns(images)[:most]  # all columns at once, because each selection copies all features
    found = []
    for name, feature in rows.features.items():
        declared = tuple(getattr(feature, "names", None) or ())
        cells = read.get(name, ())
        values, missing = _given([value for value in cells if value is not None], _MISSING)
        values, mapped = _numbers(values)
        if mapped is None and missing:  # beside texts, a word such as "n/a" is a text
            values, missing = _given([value for value in cells if value is not None], frozenset(("",)))
        kind = _kind(values) if name in read else "image"
        found.append(Column(name, kind, values, declared, cells, mapped, missing))
    return found


def _given(values: list[Any], words: frozenset[str]) -> tuple[list[Any], list[str]]:
    """Return values without NaN and without texts such as the given words, and these texts, each once."""
    types = set(map(type, values))
    if types != {str}:
        return ([value for value in values if value == value] if types == {float} else values), []
    missing = {value for value in set(values) if value.strip().casefold() in words}
    return ([value for value in values if value not in missing] if missing else values), sorted(missing)


def _numbers(values: list[Any]) -> tuple[list[Any], dict[str, Any] | None]:
    """Return values as numbers where they stand for such, and the keys of `data.map` that read them."""
    types = set(map(type, values))
    mapped: dict[str, Any] | None = None
    if types == {Decimal}:
        values, mapped = list(map(float, values)), {"type": "number"}
    elif types == {str}:
        values, mapped = _numbers_of_texts(values)
    if values and all(isinstance(value, float) and value.is_integer() for value in values):
        values = list(map(int, values))  # of a column with empty cells, or of a program without integers
    return values, mapped


def _numbers_of_texts(values: list[str]) -> tuple[list[Any], dict[str, Any] | None]:
    texts = [value.strip() for value in values]
    read = list(map(number_in, texts))
    if None not in read:
        # Whole numbers in texts are names of classes.
        has_decimals = any(isinstance(number, float) and not number.is_integer() for number in read)
        return (read, {"type": "number"}) if has_decimals else (values, None)
    for marks in _MARKS:
        if (found := _marked_numbers(texts, *marks)) is not None:
            return found
    return values, None


def _marked_numbers(texts: list[str], decimal: str, thousands: str) -> tuple[list[Any], dict[str, Any]] | None:
    """Return numbers with these marks, and the keys of `data.map` that read them; None: a text has another form."""
    group = re.escape(thousands).replace("\\ ", "[ \u00a0\u202f]").replace("'", "['\u2019]")
    form = re.compile(rf"[+-]?(\d+|[1-9]\d{{0,2}}({group}\d{{3}})+)({re.escape(decimal)}\d+)?")
    if not all(map(form.fullmatch, texts)):
        return None
    if (decimal, thousands) == (",", "."):
        # 1,137 has a separator of thousands, if no other value needs a decimal comma.
        if all(map(_ONE_GROUP.fullmatch, texts)):
            return None
        marks = {"decimal": ","}
    else:
        marks = {"decimal": ","} if decimal == "," else {}
        marks["thousands"] = thousands
    return [float(re.sub(group, "", text).replace(decimal, ".")) for text in texts], {"type": "number", **marks}


def _kind(values: Sequence[Any]) -> Kind:
    kinds = {_kind_of(value) for value in values}
    if kinds <= {"integer", "number", "boolean"} and len(kinds) > 1:
        return "number"
    if len(kinds - {"empty"}) != 1:
        return "empty" if not kinds - {"empty"} else "object"
    kind = (kinds - {"empty"}).pop()
    return "image" if kind == "text" and all(map(_names_image, values)) else kind


def _names_image(text: str) -> bool:
    """Return whether a text names an image file; an address names none."""
    return text.lower().endswith(IMAGE_ENDINGS) and "://" not in text


def _kind_of(value: Any) -> Kind:
    if isinstance(value, list):
        inner = value[0] if value else None
        if isinstance(inner, dict):
            return "chat" if inner.keys() & _ROLES and inner.keys() & _CONTENTS else "objects"
        return "empty" if inner is None else _ITEMS.get(_kind_of(inner), "image" if _is_picture(inner) else "objects")
    if isinstance(value, dict):
        return "image" if isinstance(value.get("bytes"), bytes) else "object"
    if isinstance(value, bytes):
        return "image"
    return next((kind for scalar, kind in _TYPES if isinstance(value, scalar)), "object")


def _is_picture(rows: Any) -> bool:
    """Return whether nested lists hold numbers, as `[height][width]` or `[height][width][channels]`."""
    while isinstance(rows, list) and rows:
        rows = rows[0]
    return isinstance(rows, int | float) and not isinstance(rows, bool)
