"""Files in, recipe and report out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trainer.base.errors import RecipeError
from trainer.convert.draft import Draft, Line, Outcome, Todo
from trainer.convert.examples import examples
from trainer.convert.layout import layout, precision
from trainer.convert.learning import amount, batch, optimizer, schedule, seed
from trainer.convert.running import running
from trainer.convert.sources import Tool, read_sources
from trainer.reading.explaining import explain, findings
from trainer.reading.keys import default_tag, section_model
from trainer.reading.merging import with_default_kinds
from trainer.reading.parser import Node, Origin, shown_value
from trainer.recipe.schema import Recipe

_FREE_TEXT = ("task", "model", "data")  # sections whose keys take any text, so that no check would refuse a TODO in one


@dataclass(frozen=True)
class Conversion:
    """A recipe made of other tools' files, and what became of each of their keys."""

    recipe: dict[str, Any]  # as JSON has it; a text that begins with TODO stands where the files do not tell
    missing: dict[str, str]  # what no file tells at all, by the section in which to write it
    lines: list[Line]

    @property
    def todo(self) -> dict[str, str]:
        """What the user must write, by key or section."""
        return {**dict(_todo(self.recipe, "")), **self.missing}

    def text(self) -> str:
        """The recipe as a file: sections that are missing are comments."""
        lines = []
        for name in Recipe.model_fields:
            if name in self.missing:
                lines.append(f'  // TODO "{name}": {self.missing[name]}')
            if name in self.recipe:
                lines.append(f'  "{name}": {_written(self.recipe[name], "  ")},')
        if lines and lines[-1].endswith(","):  # else something is to be written after it
            lines[-1] = lines[-1][:-1]
        return "\n".join(["{", *lines, "}", ""])

    def as_json(self) -> dict[str, Any]:
        """All of it as one object."""
        return {
            "recipe": self.recipe,
            "todo": self.todo,
            "report": [
                {
                    "tool": line.item.tool.value,
                    "place": _source(line) if line.item.origin is None else str(line.item.origin),
                    "key": line.item.key,
                    "value": line.item.value,
                    "outcome": line.outcome.value,
                    "text": line.text,
                }
                for line in self.lines
            ],
        }

    def report(self, everything: bool = False) -> str:
        """What became of each key, as text.

        Args:
            everything: also keys that ask for nothing: at their defaults, or unread by the tool itself.
        """
        parts = [f"{Outcome.TODO.value}:\n" + "".join(f"  {key}: {text}\n" for key, text in self.todo.items())]
        if not self.todo:
            parts = []
        unsaid = 0
        for outcome in Outcome:
            lines = [line for line in self.lines if line.outcome is outcome]
            shown = [line for line in lines if everything or not self._is_quiet(line)]
            unsaid += len(lines) - len(shown)
            if shown:
                heading = "keys of what is to decide" if outcome is Outcome.TODO else outcome.value
                parts.append(f"{heading}:\n" + "".join(f"  {row}\n" for row in _rows(shown)))
        if unsaid:
            parts.append(f"{unsaid} more ask for nothing, most of them at a default: --all shows them\n")
        return "\n".join(parts)

    def _is_quiet(self, line: Line) -> bool:
        """Whether a line would only say that nothing needs to be said."""
        if line.outcome in (Outcome.CONVERTED, Outcome.LAUNCHER, Outcome.UNREAD):
            return line.item.is_default and line.item.origin is not None
        return line.outcome in (Outcome.SAME, Outcome.DEFAULT)


def _rows(lines: Sequence[Line]) -> Iterator[str]:
    """A row for each line, or one for all keys of a file of which the same is said."""
    alike: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        alike.setdefault((_source(line), line.text), []).append(line)
    for (source, text), group in alike.items():
        keys = ", ".join(f"{line.item.key} {shown_value(line.item.value)}" for line in group)
        place = str(group[0].item.origin) if len(group) == 1 and group[0].item.origin else source
        yield f"{place}: {keys} -> {text}"


def _source(line: Line) -> str:
    return line.item.origin.source if line.item.origin else f"default of {line.item.tool.title}"


def _written(value: Any, indent: str) -> str:
    """A value as JSON with a line for each key; lists stay on one."""
    if not isinstance(value, dict) or not value:
        return json.dumps(value, ensure_ascii=False)
    inner = ",\n".join(f"{indent}  {json.dumps(key)}: {_written(item, indent + '  ')}" for key, item in value.items())
    return f"{{\n{inner}\n{indent}}}"


def convert(
    files: Sequence[Path], tool: Tool | None = None, processes: int | None = None, folder: Path = Path()
) -> Conversion:
    """Makes a recipe of files of other tools.

    Args:
        files: at most one of each tool.
        tool: whose file it is; None: told by its keys.
        processes: how many ranks the training had; None: as accelerate's file says.
        folder: where the recipe will lie.

    Raises:
        UsageError: a file cannot be read, or is of no known tool.
        RecipeError: values that neither the tool nor a recipe can have.
    """
    draft = Draft(read_sources(files, tool), processes)
    layout(draft)
    precision(draft)
    amount(draft)
    batch(draft)
    optimizer(draft)
    schedule(draft)
    seed(draft)
    running(draft)
    examples(draft, folder)
    lines = draft.lines()
    recipe = _recipe(draft)
    lines += [line for path, line in draft.unwritten() if _is_written(recipe, path)]
    _refuse_impossible(recipe, lines)
    return Conversion(recipe, draft.missing, lines)


def _recipe(draft: Draft) -> dict[str, Any]:
    """The keys that somebody asked for, or whose defaults differ, as nested objects in the schema's order."""
    found: dict[str, Any] = {}
    for path, value, asked in draft.values():
        section, _, key = path.partition(".")
        if isinstance(value, Todo) and section in _FREE_TEXT:
            before = f"; {draft.missing[section]}" if section in draft.missing else ""
            draft.missing[section] = f'"{key}": {value.text}{before}'
        elif asked or isinstance(value, Todo) or value != _default(path, draft):
            found[path] = str(value) if isinstance(value, Todo) else value
    recipe: dict[str, Any] = {}
    for name in Recipe.model_fields:
        for path, value in found.items():
            parts = path.split(".")
            if parts[0] == name:
                inner = recipe
                for part in parts[:-1]:
                    inner = inner.setdefault(part, {})
                inner[parts[-1]] = value
    if draft.value("data.source") is None:  # its keys stand in the report until there is a source
        recipe.pop("data", None)
    if draft.value("task.type") is None:
        recipe.pop("task", None)
    return recipe


def _is_written(recipe: dict[str, Any], path: str) -> bool:
    value: Any = recipe
    for part in path.split("."):
        if not isinstance(value, dict) or part not in value:
            return False
        value = value[part]
    return True


def _default(path: str, draft: Draft) -> Any:
    """The schema's default of a key, as JSON has it; a value that nothing equals where there is none."""
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


def _todo(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _todo(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, str) and value.startswith("TODO: "):
        yield path, value.removeprefix("TODO: ")


def _refuse_impossible(recipe: dict[str, Any], lines: Sequence[Line]) -> None:
    """Refuses values that no recipe can have, such as a negative learning rate, where they were written.

    Raises:
        RecipeError: all of them.
    """
    root = with_default_kinds(_with_origins(recipe, "", lines))
    try:
        Recipe.model_validate(root.plain())
    except ValidationError as error:
        open_keys = dict(_todo(recipe, ""))
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
    """The recipe as a tree that remembers from which file each value came."""
    if isinstance(value, dict):
        members = {key: _with_origins(inner, f"{path}.{key}" if path else key, lines) for key, inner in value.items()}
        return Node(members, Origin("converted recipe"))
    places = (line.item.origin for line in lines if f"`{path}`" in line.text)
    origin = next((place for place in places if place), Origin("converted recipe"))
    return Node([_with_origins(item, path, lines) for item in value] if isinstance(value, list) else value, origin)
