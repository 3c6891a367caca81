"""The base class of sections, and the parts of their rules."""

from __future__ import annotations

import ast
import inspect
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, pairwise
from types import ModuleType
from typing import Any

from pydantic import BaseModel, ConfigDict

from trainer.recipe.paths import KeyPath, shown_value


@dataclass(frozen=True)
class Contradiction:
    """Keys that do not combine; reported at the first key."""

    keys: tuple[KeyPath, ...]
    text: str  # follows the first key
    is_missing_data: bool = False  # whether a file or folder of rows is not there, which a plan does not need


def clash(text: str, *keys: str) -> Contradiction:
    return Contradiction(tuple(tuple(key.split(".")) for key in keys), text)


@cache
def descriptions(section: type[BaseModel]) -> Mapping[str, str]:
    """Return the docstrings below the keys of a section, read from its source; empty without a source file."""
    texts = {}
    # Bases first, so that a docstring of the class replaces that of a base.
    for part in reversed(section.__mro__):
        try:
            module = _classes(sys.modules[part.__module__]) if issubclass(part, Section) else {}
        # `inspect` finds no source of a class from a notebook or a compiled module.
        except (KeyError, OSError, TypeError):
            continue
        body = module[part.__name__].body if part.__name__ in module else []
        # Python discards the text below an assignment, so only the source has it.
        for key, text in pairwise(body):
            match key, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(docstring))):
                    texts[name] = " ".join(docstring.split())
    return texts


@cache
def _classes(module: ModuleType) -> Mapping[str, ast.ClassDef]:
    tree = ast.parse(inspect.getsource(module))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _describe(schema: dict[str, Any], section: type[BaseModel]) -> None:
    for key, text in descriptions(section).items():
        # A description that the field has itself takes precedence.
        schema["properties"][key].setdefault("description", text)


class Section(BaseModel):
    """A group of keys. Unknown keys are errors, and values are not converted to other types."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        json_schema_extra=_describe,
        defer_build=True,  # features add keys before the first use
    )

    def contradictions(self) -> Iterator[Contradiction]:
        """Yield the keys of this valid section, with absolute paths, that do not combine."""
        return iter(())

    def changed(self, *keys: str) -> list[str]:
        """Return the keys with another value than their default, which `trainer check --json` writes too."""
        return [key for key in keys if getattr(self, key) != type(self).model_fields[key].default]


def repeated(key: str, values: Sequence[object]) -> Iterator[Contradiction]:
    for value in (value for value, count in Counter(values).items() if count > 1):
        yield clash(f"has {shown_value(value)} more than once; remove one", key)


def shared(columns: Mapping[str, str | list[str] | None]) -> Iterator[Contradiction]:
    """Yield the columns that several keys of `task` name."""
    names = {key: {value} if isinstance(value, str) else {*(value or ())} for key, value in columns.items()}
    for column, other in combinations(columns, 2):
        for name in sorted(names[column] & names[other]):
            has = "is" if columns[other] == name else "has the column"
            text = f"{has} {shown_value(name)}, which is also `task.{column}`; name another column"
            yield clash(text, f"task.{other}", f"task.{column}")


def missing_folder(key: str, place: str | None) -> Iterator[Contradiction]:
    if place and os.path.isabs(place) and not os.path.isdir(place):
        is_data = key.startswith("data.")
        yield Contradiction((tuple(key.split(".")),), f"is a folder that does not exist: {place}", is_data)


def hub_or_folder(key: str, place: str | None, revision: str | None) -> Iterator[Contradiction]:
    """Refuse a missing folder, and the revision of a folder; a name on the hub is not absolute."""
    yield from missing_folder(key, place)
    if place and revision is not None and os.path.isabs(place):
        section = key.partition(".")[0]
        yield clash(f"applies to a hub repository, but `{key}` is a folder; remove it", f"{section}.revision")
