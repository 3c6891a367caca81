"""A draft of the recipe: the values proposed for each of its keys, and the outcome of each key of the files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from enum import Enum
from typing import Any, TypeVar

from trainer.base.errors import RecipeError
from trainer.recipe.paths import shown_value
from trainer.tools.convert.foreign import values as convert_by
from trainer.tools.convert.foreign.tables import Counterpart, Kind
from trainer.tools.convert.foreign.values import Converted, Todo, WrongValueError
from trainer.tools.convert.sources import Item, Sources, Tool

T = TypeVar("T")

LEFT_OUT = "was not converted because of the other keys"


class Outcome(Enum):
    """Outcome of a key; the values are the headings of the report, in its order."""

    TODO = "to decide"
    DIFFERS = "different behaviour"
    CONVERTED = "converted"
    NONE = "no counterpart"
    UNKNOWN = "unknown key"
    SAME = "same behaviour"
    LAUNCHER = "set by the launcher"
    UNREAD = "not read"  # by the tool because of other keys; or another file has precedence
    DEFAULT = "default without effect"


@dataclass(frozen=True)
class Line:
    """The outcome of one key."""

    item: Item
    outcome: Outcome
    text: str


@dataclass(frozen=True)
class _Proposal:
    value: Any
    items: tuple[Item, ...]
    note: str
    differs: bool

    @property
    def is_weak(self) -> bool:
        """Whether it comes only from defaults of the tool."""
        return all(item.is_default for item in self.items)

    @property
    def is_of_program(self) -> bool:
        return any(item.program is not None or item.tool.is_program for item in self.items)


@dataclass
class Draft:
    """Proposed values for keys of the recipe, and outcomes of keys of the files."""

    sources: Sources
    processes: int | None
    problems: list[str] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)  # sections that no file has, and the text of their TODO
    _proposals: dict[str, list[_Proposal]] = field(default_factory=dict)
    _lines: dict[tuple[Tool, str], Line] = field(default_factory=dict)

    # Called by the topics

    def take(self, path: str, value: object, *items: Item | None, note: str = "", differs: bool = False) -> None:
        """Propose a value for a key of the recipe.

        Args:
            path: The key of the recipe; with a leading `#`, an intermediate number.
            value: A JSON value or a `Todo`.
            items: The keys that it comes from; None for one that is not written.
            note: A remark for the report.
            differs: Whether `note` describes different behaviour.
        """
        self._proposals.setdefault(path, []).append(_Proposal(value, tuple(filter(None, items)), note, differs))

    def refuse(self, path: str, text: str, *items: Item | None) -> None:
        """Leave a key of the recipe to the user, because the value in the files has no counterpart."""
        self.take(path, Todo(text), *items)

    def say(self, item: Item | None, outcome: Outcome, text: str) -> None:
        """Set the outcome of a key without a value in the recipe; for an unwritten key only if it differs."""
        if item is not None and (item.origin is not None or outcome is Outcome.DIFFERS):
            self._lines[item.tool, item.key] = Line(item, outcome, text)

    def note(self, item: Item, outcome: Outcome, text: str) -> None:
        """Add an outcome of a key beside those that it has."""
        self._lines[item.tool, item.key] = _joined(self._lines.get((item.tool, item.key)), Line(item, outcome, text))

    def unread(self, why: str, *items: Item | None) -> None:
        """Report keys that the tool ignores because of other keys."""
        for item in items:
            self.say(item, Outcome.UNREAD, why)

    def convert_rows(self) -> None:
        """Convert each key that has a conversion of its own, unless it is unread.

        An unwritten key of TrainingArguments or a program has its default; those of other tools may follow from
        TrainingArguments.
        """
        for tool in self.sources.files:
            for name, row in tool.table.items():
                default = self.sources.arguments.get(name) if tool is Tool.TRAINING_ARGUMENTS else None
                if default is not None and row.kind is Kind.RENAMED and not self.sources.written(tool, name):
                    self.take(str(row.key), default.value, default)
                if row.value is not None and (tool, name) not in self._lines:
                    has_default = tool is Tool.TRAINING_ARGUMENTS or tool.is_program
                    find = self.sources.get if has_default else self.sources.written
                    self._convert_row(find(tool, name), row)

    def _convert_row(self, item: Item | None, row: Counterpart) -> None:
        if item is None or row.value is None or (item.value is None and item.is_default):
            return
        key = str(row.key)
        match self.read(item, row.value, ...):
            case Todo(text):
                self.refuse(key, text.replace("{key}", item.name), item)
            case Converted(value, note, differs):
                self.take(key, value, item, note=note, differs=differs)
            case value if value is not ...:
                self.take(key, value, item, note=row.note if row.kind is Kind.RENAMED else "")

    def override(self, path: str, value: object, *items: Item | None, note: str) -> None:
        """Propose a value instead of all earlier proposals."""
        self._proposals[path] = []
        self.take(path, value, *items, note=note)

    def combine(self, path: str, values: set[Any], result: Any) -> None:
        """Replace proposals that do not contradict each other by their common result."""
        proposals = self._proposals.get(path, [])
        if values <= {proposal.value for proposal in proposals if not isinstance(proposal.value, Todo)}:
            self._proposals[path] = [
                replace(proposal, value=result) if proposal.value in values else proposal for proposal in proposals
            ]

    # Values of the right type

    def read(self, item: Item | None, value: Callable[[Any], T], fallback: T) -> T:
        """Return the converted value; `fallback` for a key that is not written or, with a problem, is wrong."""
        if item is None:
            return fallback
        try:
            return value(item.value)
        except WrongValueError as error:
            self.problem(item, f"must be {error}, but is {shown_value(item.value)}")
            return fallback

    def number(self, item: Item | None, fallback: float = 0.0) -> float:
        return self.read(item, convert_by.number, fallback)

    def whole(self, item: Item | None, fallback: int = 0) -> int:
        return self.read(item, convert_by.whole, fallback)

    def positive(self, item: Item | None) -> int:
        return self.read(item, convert_by.positive, 1)

    def flag(self, item: Item | None) -> bool:
        return self.read(item, convert_by.flag, False)

    def text(self, item: Item | None, fallback: str = "") -> str:
        return self.read(item, convert_by.text, fallback)

    def names(self, item: Item | None) -> list[str]:
        """Return the names in a list or in a text with commas; none if the key is not set."""
        return self.read(item, convert_by.names, []) if item is not None and item.value else []

    def refuse_file(self, item: Item, why: str) -> None:
        """Refuse the file because of a key that decides what is learned."""
        rule = f"decides what is learned, and has no counterpart: {why}; remove it to train without it"
        self.problem(item, rule)

    def _unknown(self, item: Item) -> None:
        if item.value in (None, "", [], {}):  # false and 0 decide as much as other values
            self.say(item, Outcome.UNKNOWN, "not set, and ignored")
            return
        near = get_close_matches(item.key, item.tool.table, n=1, cutoff=0.8)
        meant = f"did you mean `{near[0]}`? Or" if near else "correct its name, or"
        rule = f"is not known as a key of {item.title}, and may decide what is learned; {meant}"
        self.problem(item, f"{rule} remove it to train without it")

    def problem(self, item: Item, rule: str) -> None:
        """Refuse the file because of a key; the rule follows its name."""
        where = f"{item.origin}: " if item.origin else ""
        self.problems.append(f"{where}`{item.name}` {rule}")
        self.say(item, Outcome.TODO, "invalid")

    # Results

    def value(self, path: str, default: Any = None) -> Any:
        """Return the value of a key, a `Todo` if its proposals conflict, or `default` if there are none."""
        proposals = self._proposals.get(path, [])
        # A default of one tool does not contradict a key that another file writes.
        strong = [proposal for proposal in proposals if not proposal.is_weak]
        # A program's defaults replace those of the Trainer.
        strong = strong or [proposal for proposal in proposals if proposal.is_of_program] or proposals
        if not strong:
            return default
        first = strong[0]
        if all(proposal.value == first.value for proposal in strong):
            return first.value
        claims = dict.fromkeys(
            f"{_shown(proposal.value)} from {' x '.join(map(str, proposal.items))}" for proposal in strong
        )
        return Todo(f"conflict: {', or '.join(claims)}")

    def values(self) -> Iterator[tuple[str, Any, bool]]:
        """Yield each key of the recipe, its value, and whether a file requests it explicitly."""
        for path, proposals in self._proposals.items():
            if not path.startswith("#"):
                yield path, self.value(path), any(not proposal.is_weak for proposal in proposals)

    def unwritten(self) -> Iterator[tuple[str, Line]]:
        """Yield the keys of the recipe that follow from defaults of the tools."""
        for path, proposals in self._proposals.items():
            items = [item for proposal in proposals for item in proposal.items]
            if not any(item.origin for item in items) and not isinstance(self.value(path), Todo):
                for item in items:
                    yield path, Line(item, Outcome.CONVERTED, f"`{path}` {_shown(self.value(path))}")

    def lines(self) -> list[Line]:
        """Return the outcome of each key of the files.

        Raises:
            RecipeError: all invalid values.
        """
        for item in self.sources.all():
            self._rest(item)
        if self.problems:
            raise RecipeError(*dict.fromkeys(self.problems))
        lines = self._proposed_lines() | self._lines
        for item in self.sources.all():
            assert (item.tool, item.key) in lines, f"{item} has no outcome"
        return sorted(lines.values(), key=_place)

    def _rest(self, item: Item) -> None:
        """Set the outcome of a key that no topic converted, from its row."""
        used = (its for proposals in self._proposals.values() for proposal in proposals for its in proposal.items)
        if (item.tool, item.key) in self._lines or any(its is item for its in used):
            return
        row = item.row
        if row is None:
            self._unknown(item)
        elif item.is_auto and self.sources.has(Tool.TRAINING_ARGUMENTS):
            self.say(item, Outcome.SAME, "TrainingArguments or the model determine it")
        elif item.is_auto:
            self.say(item, Outcome.TODO, "TrainingArguments determine it; give that file too")
        elif row.kind is Kind.RENAMED and not (item.value is None and item.is_default):
            self.take(str(row.key), item.value, item, note=row.note)
        else:
            self._without_key(item, row)

    def _without_key(self, item: Item, row: Counterpart) -> None:
        """Set the outcome of a key that gives the recipe no value."""
        # The first case that fits counts: a default is no loss, whatever its row says of other values.
        if row.kind is Kind.LAUNCHER:
            self.say(item, Outcome.LAUNCHER, row.note)
        elif row.kind is Kind.SAME and (item.is_default or not row.defaults):
            self.say(item, Outcome.SAME, row.note)
        elif item.is_default or (row.kind is Kind.REFUSED and _is_off(item)):
            self.say(item, Outcome.DEFAULT, row.note or f"see `{row.key}`")
        elif row.kind is Kind.ARGUMENT and item.value is None:
            self.say(item, Outcome.DEFAULT, "is not set")
        elif row.kind is Kind.REFUSED:
            self.refuse_file(item, row.note)
        elif row.kind in (Kind.NONE, Kind.SAME) or (row.kind is Kind.ARGUMENT and not row.key):
            self.say(item, Outcome.NONE, row.note)
        else:
            self._left_out(item, row)

    def _left_out(self, item: Item, row: Counterpart) -> None:
        """Set the outcome of a key with a counterpart, against which other keys decided."""
        if not item.value:
            self.say(item, Outcome.DEFAULT, f"is not set; see `{row.key}`")
        elif any(key.startswith(f"{item.key}.") for key in item.tool.table):
            self.problem(item, f"must be an object with keys, but is {shown_value(item.value)}")
        else:
            self.say(item, Outcome.TODO, f"{LEFT_OUT}: it is `{row.key}` here")

    def _proposed_lines(self) -> dict[tuple[Tool, str], Line]:
        lines: dict[tuple[Tool, str], Line] = {}
        for path, proposals in self._proposals.items():
            result = self.value(path)
            for proposal in proposals:
                outcome, text = self._outcome(path, proposal, result)
                for item in proposal.items:
                    if item.origin is None:
                        continue
                    before = lines.get((item.tool, item.key))
                    lines[item.tool, item.key] = _joined(before, Line(item, outcome, text))
        return lines

    @staticmethod
    def _outcome(path: str, proposal: _Proposal, result: Any) -> tuple[Outcome, str]:
        note = f" ({proposal.note})" if proposal.note else ""
        key = path.removeprefix("#")
        if isinstance(result, Todo):
            return Outcome.TODO, f"`{key}`: {result.text}"
        if result != proposal.value:
            return Outcome.UNREAD, f"`{key}` {_shown(result)} overrides the default {_shown(proposal.value)}"
        text = "counted in `training.global_batch_size`" if path.startswith("#") else f"`{key}` {_shown(result)}"
        return (Outcome.DIFFERS if proposal.differs else Outcome.CONVERTED), text + note


def _joined(before: Line | None, line: Line) -> Line:
    """Return the one line of a key, under the outcome that needs the user most; `Outcome` is in this order."""
    if before is None:
        return line
    outcome = min(line.outcome, before.outcome, key=list(Outcome).index)
    text = f"{before.text}; {line.text}" if line.text not in before.text else before.text
    return Line(line.item, outcome, text)


def _is_off(item: Item) -> bool:
    """Return whether a key is written to have no effect, as is a section of DeepSpeed with `enabled` false."""
    if isinstance(item.value, dict):
        return not item.value.get("enabled", item.value)
    return not item.value and not (item.row is not None and item.row.is_default(True))


def _place(line: Line) -> tuple[str, int, int]:
    origin = line.item.origin
    return (origin.source, origin.line, origin.column) if origin else ("", 0, 0)


def _shown(value: object) -> str:
    return str(value) if isinstance(value, Todo) else json.dumps(value, ensure_ascii=False)
