"""Conversion of files of other tools to a recipe and a report."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trainer.base.errors import RecipeError
from trainer.base.text import dotted_leaves, one_line
from trainer.recipe.paths import shown_value
from trainer.recipe.reading.explaining import explain, findings
from trainer.recipe.reading.keys import default_tag, section_model
from trainer.recipe.reading.merging import with_default_kinds
from trainer.recipe.reading.parser import Node, Origin
from trainer.recipe.schema import Recipe
from trainer.tools.convert.draft import Draft, Line, Outcome
from trainer.tools.convert.examples import examples, lengths, smoothing
from trainer.tools.convert.foreign.values import Todo
from trainer.tools.convert.layout import layout, offload_and_deepspeed, precision, unread_sections
from trainer.tools.convert.learning import amount, batch, optimizer, schedule, seed, unread_arguments
from trainer.tools.convert.programs.table import PROGRAMS
from trainer.tools.convert.running import running
from trainer.tools.convert.sources import Tool, read_sources

_FREE_TEXT = ("task", "model", "data")  # sections with free text, in which validation would accept a TODO


@dataclass(frozen=True)
class Conversion:
    """A recipe from files of other tools, and the outcome of each of their keys."""

    recipe: dict[str, Any]  # JSON values; a text "TODO: ..." for each value that the files do not have
    missing: dict[str, str]  # the text of the TODO of each section that no file has
    lines: list[Line]

    @property
    def todo(self) -> dict[str, str]:
        """The parts that the user must write, by key or section."""
        return {**_todo(self.recipe), **self.missing}

    def text(self) -> str:
        """Return the recipe as a file, with comments for missing sections."""
        lines = []
        for name in Recipe.model_fields:
            if name in self.missing:
                lines.append(f'  // TODO "{name}": {self.missing[name]}')
            if name in self.recipe:
                lines.append(f'  "{name}": {_written(self.recipe[name], "  ")},')
        if lines and lines[-1].endswith(","):  # the last section is not a comment
            lines[-1] = lines[-1][:-1]
        return "\n".join(["{", *lines, "}", ""])

    def as_json(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe,
            "todo": self.todo,
            "report": [
                {
                    "tool": (line.item.program or line.item.tool).value,
                    "place": _source(line) if line.item.origin is None else str(line.item.origin),
                    "key": line.item.name,
                    "value": line.item.value,
                    "outcome": line.outcome.value,
                    "text": line.text,
                }
                for line in self.lines
            ],
        }

    def report(self, everything: bool = False) -> str:
        """Return the outcome of each key, as text.

        Args:
            everything: Whether to include keys without effect, such as defaults.
        """
        parts = []
        if self.todo:
            parts.append(
                f"{Outcome.TODO.value}:\n"
                + "".join(f"  {one_line(f'{key}: {text}')}\n" for key, text in self.todo.items())
            )
        hidden = 0
        for outcome in Outcome:
            lines = [line for line in self.lines if line.outcome is outcome]
            shown = [line for line in lines if everything or not self._is_quiet(line)]
            hidden += len(lines) - len(shown)
            if shown:
                heading = "keys of these decisions" if outcome is Outcome.TODO else outcome.value
                parts.append(f"{heading}:\n" + "".join(f"  {one_line(row)}\n" for row in _rows(shown)))
        if hidden:
            parts.append(f"{hidden} more keys have no effect, most of them defaults; --all shows them\n")
        return "\n".join(parts)

    def _is_quiet(self, line: Line) -> bool:
        if line.outcome in (Outcome.CONVERTED, Outcome.LAUNCHER, Outcome.UNREAD):
            return line.item.is_default and line.item.origin is not None
        return line.outcome in (Outcome.SAME, Outcome.DEFAULT)


def _rows(lines: Sequence[Line]) -> Iterator[str]:
    """Yield a row for each group of keys of a file with the same text."""
    alike: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        alike.setdefault((_source(line), line.text), []).append(line)
    for (source, text), group in alike.items():
        keys = ", ".join(f"{line.item.name} {shown_value(line.item.value)}" for line in group)
        place = str(group[0].item.origin) if len(group) == 1 and group[0].item.origin else source
        yield f"{place}: {keys} -> {text}"


def _source(line: Line) -> str:
    return line.item.origin.source if line.item.origin else f"default of {line.item.title}"


def _written(value: Any, indent: str) -> str:
    """Return a value as JSON with a line for each key; a list is on one line."""
    if not isinstance(value, dict) or not value:
        return json.dumps(value, ensure_ascii=False)
    inner = ",\n".join(f"{indent}  {json.dumps(key)}: {_written(item, indent + '  ')}" for key, item in value.items())
    return f"{{\n{inner}\n{indent}}}"


def convert(
    files: Sequence[Path], tool: Tool | None = None, processes: int | None = None, folder: Path = Path()
) -> Conversion:
    """Convert files of other tools to a recipe.

    Args:
        files: At most one file of each tool.
        tool: The tool of the file; None to recognise it from the keys.
        processes: The number of ranks of the training; None for that of accelerate's file.

    Raises:
        UsageError: a file cannot be read, or its tool is unknown.
        RecipeError: values are invalid for the tool or for a recipe.
    """
    sources = read_sources(files, tool)
    program = PROGRAMS.get(sources.program) if sources.program else None
    if program:
        program.prepare(sources)
    draft = Draft(sources, processes)
    unread_sections(draft)
    unread_arguments(draft)
    for topic in (layout, precision, amount):
        topic(draft)
    draft.convert_rows()
    for topic in (offload_and_deepspeed, batch, optimizer, schedule, seed, running):
        topic(draft)
    if program:
        program.convert(draft, folder)
        lengths(draft)
        smoothing(draft)
    else:
        examples(draft, folder)
    draft.say(sources.launcher, Outcome.LAUNCHER, "starts the ranks")
    lines = draft.lines()
    recipe = _recipe(draft)
    written = dotted_leaves(recipe)
    lines += [line for path, line in draft.unwritten() if path in written]
    _refuse_impossible(recipe, lines)
    return Conversion(recipe, draft.missing, lines)


def _recipe(draft: Draft) -> dict[str, Any]:
    """Return the requested keys, and those with other defaults, as nested objects in schema order."""
    found: dict[str, Any] = {}
    for path, value, asked in draft.values():
        section, _, key = path.partition(".")
        if isinstance(value, Todo) and section in _FREE_TEXT and draft.sources.program is None:
            before = f"; {draft.missing[section]}" if section in draft.missing else ""
            draft.missing[section] = f'"{key}": {value.text}{before}'
        elif asked or isinstance(value, Todo) or value != _default(path, draft):
            found[path] = str(value) if isinstance(value, Todo) else value
    order = list(Recipe.model_fields)
    recipe: dict[str, Any] = {}
    for path in sorted(found, key=lambda path: order.index(path.partition(".")[0])):
        inner = recipe
        *sections, key = path.split(".")
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[key] = found[path]
    for section in filter(lambda value: isinstance(value, dict), recipe.values()):
        first = {key: section.pop(key) for key in ("type", "source") if key in section}
        rest = dict(section)
        section.clear()
        section.update(first | rest)
    return recipe


def _default(path: str, draft: Draft) -> Any:
    model: Any = Recipe
    parts = path.split(".")
    for part in parts[:-1]:
        field = model.model_fields.get(part)
        if field is None:
            return ...
        kind = draft.value(f"{part}.{field.discriminator}") or default_tag(field)
        node = Node({str(field.discriminator): Node(kind, Origin(""))}, Origin(""))
        model = section_model(field, node)
        if model is None:
            return ...
    field = model.model_fields.get(parts[-1])
    if field is None or field.is_required():
        return ...
    default = field.get_default(call_default_factory=True)
    return default if isinstance(default, (bool, int, float, str, list, dict)) or default is None else str(default)


def _todo(recipe: dict[str, Any]) -> dict[str, str]:
    texts = {path: value for path, value in dotted_leaves(recipe).items() if isinstance(value, str)}
    return {path: text.removeprefix("TODO: ") for path, text in texts.items() if text.startswith("TODO: ")}


def _refuse_impossible(recipe: dict[str, Any], lines: Sequence[Line]) -> None:
    """Raise `RecipeError` with all values that are invalid in a recipe, such as a negative learning rate."""
    root = with_default_kinds(_with_origins(recipe, "", lines))
    try:
        Recipe.model_validate(root.plain())
    except ValidationError as error:
        open_keys = _todo(recipe)
        wrong = [
            finding
            for finding in findings(error)
            if finding.error != "missing" and not finding.error.startswith("union_tag")
            if not any(".".join(map(str, finding.path)).startswith(key) for key in open_keys)
        ]
        problems = [str(problem) for finding in wrong for problem in explain(finding, root)]
        if problems:
            raise RecipeError(*problems) from error


def _with_origins(value: Any, path: str, lines: Sequence[Line]) -> Node:
    if isinstance(value, dict):
        members = {key: _with_origins(inner, f"{path}.{key}" if path else key, lines) for key, inner in value.items()}
        return Node(members, Origin("converted recipe"))
    places = (line.item.origin for line in lines if f"`{path}`" in line.text)
    origin = next((place for place in places if place), Origin("converted recipe"))
    return Node([_with_origins(item, path, lines) for item in value] if isinstance(value, list) else value, origin)
