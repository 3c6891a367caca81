"""The keys `map` and `maps` of the section `data` of a recipe, and their rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, cast

from pydantic import Field

from trainer.recipe.paths import KeyPath, dotted
from trainer.recipe.schema import Data, DataKeys, FileData
from trainer.recipe.schema.fields import Name, NameKey
from trainer.recipe.schema.section import Contradiction, Section, clash


class MadeMessage(Section):
    """A message of a chat that is made from columns."""

    role: Literal["system", "developer", "user", "assistant", "turns"]
    """Role of the message. `turns`: earlier turns, as pairs of a user's text and its answer."""
    content: Name
    """A template, or the column of `turns`; a message without text is left out."""


class ChatKeys(Section):
    """Keys of messages in other spellings."""

    role: Name = "role"
    """Key of the role in the source."""
    content: Name = "content"
    """Key of the text in the source."""
    roles: dict[NameKey, Literal["system", "developer", "user", "assistant", "tool", "tool_calls"]] = Field({})
    """Role of each name in the source that differs, such as {"human": "user"}; `tool_calls`: a turn with tool calls as
    JSON."""
    system: Name | None = None
    """Column of the system message of a chat that begins with the user's turn; null: chats hold their own."""
    drop: list[Name] = Field([])
    """Keys of messages to leave out, such as ["timestamp"]; a key that nothing reads is refused."""


class MappedColumn(Section):
    """A column that is made from one column of the source."""

    column: Name
    """Column of the source."""
    type: Literal["text", "integer", "number", "boolean"] | None = None
    """Type of the values; null: that of the source."""
    values: Annotated[dict[str, str | int | float | bool], Field(min_length=1)] | None = None
    """New value for each value, such as {"1": "bad", "5": "good"}; others are refused."""
    decimal: Literal[".", ","] = "."
    """Decimal mark of numbers in texts, for `type` number; with a comma, points between groups are left out."""
    thousands: Literal[",", ".", " ", "'"] | None = None
    """Mark between groups of three digits, such as 1,234.5, for `type` number; null: none, but see `decimal`."""
    chat: ChatKeys | None = None
    """Read chats with other keys of messages."""

    def problem(self) -> str | None:
        """Return the problem of keys that do not combine."""
        if len(given := self.changed("type", "values", "chat")) > 1:
            return f"has {' and '.join(f'`{key}`' for key in given)}; set one of them"
        if self.type != "number" and (marks := self.changed("decimal", "thousands")):
            return f"has `{marks[0]}`, which applies to `type` number; set that too"
        if self.thousands == self.decimal:
            return f"has {self.decimal!r} as `decimal` and as `thousands`; give one of them another mark"
        kinds = {type(value) for value in (self.values or {}).values()}
        return "has `values` of several types; use one type" if len(kinds) > 1 else None


class FlagColumns(Section):
    """A column that is made of several columns of 0 and 1, or of false and true."""

    flags: Annotated[list[Name], Field(min_length=2)]
    """Columns of the source. The value is the list of the names of those that are 1, for `task.multi_label`."""
    exactly_one: bool = False
    """One of them is 1 in each row, and its name is the value; other rows are refused."""


Mapped = Name | MappedColumn | FlagColumns | Annotated[list[MadeMessage], Field(min_length=1)]


class DataMap(Section):
    """Columns that the task reads, made from those of the source, in all splits and in files to predict."""

    shape: Literal["auto", "none", "sharegpt", "alpaca"] = "auto"
    """sharegpt: chats with `from` and `value`, and `system`; alpaca: `instruction`, `input`, `output`, and in chats
    `system` and `history`; auto: recognised, with a note."""
    columns: Annotated[dict[NameKey, Mapped], Field(min_length=1)] | None = None
    """New columns; others are left out. A value is a column of the source, a template such as
    "{instruction}[\\n{input}]", a list of messages and earlier turns, or an object. A part of a template in brackets is
    left out if a column in it is null or blank; {?column} in it keeps it with a text there, {!column} without one.
    {turns[1].text}: key of an item of a list. [[ and {{ are characters. null: the columns of the source."""
    where: list[Name] = Field([])
    """Conditions on rows, such as ["language == en", "score >= 0.5"]. Operators: ==, !=, <, <=, >, >=, in and not in.
    A column in double quotes may have blanks around it. `trainer predict` and `trainer mine` read all rows."""

    def contradictions(self, base: KeyPath = ("data", "map")) -> Iterator[Contradiction]:
        if self == type(self)():
            return  # most recipes need no parser of texts
        from trainer.features.data_map.texts import Comparison, Template

        if self.columns is not None and self.shape in ("sharegpt", "alpaca"):
            own: KeyPath = (*base, "columns")
            text = f'is "{self.shape}", which stands for its own `{dotted(own)}`; remove one of them'
            yield Contradiction(((*base, "shape"), own), text)
        for place, condition in enumerate(self.where):
            if problem := _problem(Comparison.parse, condition):
                yield Contradiction(((*base, "where", place),), problem)
        for name, mapped in (self.columns or {}).items():
            if isinstance(mapped, MappedColumn):
                if problem := mapped.problem():
                    yield Contradiction(((*base, "columns", name),), problem)
            elif isinstance(mapped, FlagColumns):
                if len(set(mapped.flags)) < len(mapped.flags):
                    yield Contradiction(((*base, "columns", name, "flags"),), "has a column twice; remove one")
            elif isinstance(mapped, str):
                if is_template(mapped) and (problem := _problem(Template.parse, mapped)):
                    yield Contradiction(((*base, "columns", name),), problem)
            else:
                for place, message in enumerate(mapped):
                    if message.role != "turns" and (problem := _problem(Template.parse, message.content)):
                        yield Contradiction(((*base, "columns", name, place, "content"),), problem)


class MapKeys(DataKeys):
    """The map of a recipe."""

    map: DataMap = DataMap()
    """Columns that the task reads, made from those of the source: in all splits, and in files to predict."""

    def contradictions(self) -> Iterator[Contradiction]:
        yield from self.map.contradictions()


class FileMapKeys(FileData):
    """The maps of files of several shapes."""

    maps: list[DataMap] | None = None
    """Map of each entry of `train`, such as [{"shape": "alpaca"}, {}], and `map` for others; null: `map` is for all."""

    def contradictions(self) -> Iterator[Contradiction]:
        number = len(self.train) if isinstance(self.train, list) else 1
        if self.maps is not None and len(self.maps) != number:
            text = f"has {len(self.maps)} maps, but `data.train` has entries: {number}; give each one map, perhaps {{}}"
            yield clash(text, "data.maps", "data.train")
        for place, section in enumerate(self.maps or []):
            yield from section.contradictions(("data", "maps", place))


def map_of(data: Data) -> DataMap:
    """Return the map of a recipe."""
    return cast(MapKeys, data).map


def maps_of(data: FileData) -> list[DataMap] | None:
    """Return the map of each entry of `data.train`; None: all have that of the recipe."""
    return cast(FileMapKeys, data).maps


def is_template(text: str) -> bool:
    """Return whether the value of a column is a template, and not the name of a column."""
    return "{" in text or "}" in text


def _problem(parse: Callable[[str], Any], text: str) -> str | None:
    try:
        parse(text)
    except ValueError as error:
        return str(error)
    return None
