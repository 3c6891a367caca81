"""A recipe in the making: values with comments, beneath the overrides of the user."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from trainer.base.errors import UsageError
from trainer.base.text import dotted_leaves
from trainer.recipe.reading.files import YAML_ENDINGS, is_yaml
from trainer.recipe.reading.loading import ResolvedRecipe, resolve
from trainer.recipe.reading.merging import merged, with_default_kinds
from trainer.recipe.reading.overrides import override_layer
from trainer.recipe.reading.parser import Node, Origin, parse

_PLAIN = re.compile(r"[A-Za-z_/.][\w./-]*")
_WORDS = {"true", "false", "null", "yes", "no", "on", "off", "y", "n", ".nan", ".inf"}  # also those of YAML 1.1


def recipe_place(source: Path, output: Path | None) -> Path:
    """Return the file of the recipe; None: the name of the data, in the current folder.

    Raises:
        UsageError: the file exists, or its ending is not that of YAML.
    """
    place = output or Path(recipe_name(source) + YAML_ENDINGS[0])
    if not is_yaml(place):
        raise UsageError(f"`--output` must end with {' or '.join(YAML_ENDINGS)}, but is {place}; comments need YAML")
    if os.path.lexists(place):
        raise UsageError(f"--output must name a new file, but {place} exists; name another")
    return place


def recipe_name(source: Path) -> str:
    """Return the name of a recipe for a file or a folder."""
    stem = Path(os.path.abspath(source)).name.split(".")[0]
    return re.sub(r"[^A-Za-z0-9_-]+", "_", stem).strip("_-")[:100] or "mine"


@dataclass(frozen=True)
class InitRequest:
    """The data and the wishes of the user."""

    source: Path
    output: Path
    overrides: tuple[str, ...]
    model: str | None  # a folder, a name on the hub, or `SAMPLE`; None: to ask
    gpus: str | None  # as `trainer plan` takes them; None: to ask

    @cached_property
    def given(self) -> dict[str, Any]:
        """The values of the overrides, by dotted key."""
        return dotted_leaves(override_layer(self.overrides)[0].plain())


@dataclass(frozen=True)
class Draft:
    """The values of a recipe, and the comments of its keys."""

    request: InitRequest
    values: dict[str, Any] = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)

    def put(self, key: str, value: Any, comment: str = "") -> None:
        """Set a key that the user has not given."""
        if key in self.request.given:
            return
        section, _, name = key.rpartition(".")
        (self.values.setdefault(section, {}) if section else self.values)[name] = value
        if comment:
            self.comments[key] = comment

    def get(self, key: str) -> Any:
        """Return the value of a key of a section, as the user or this draft set it."""
        section, _, name = key.rpartition(".")
        return self.request.given.get(key, self.values.get(section, {}).get(name))

    def resolved(self, overrides: Sequence[str] = ()) -> ResolvedRecipe:
        """Return the recipe, with more overrides after those of the user.

        Raises:
            RecipeError: all problems of the recipe.
        """
        root, problems = override_layer([*self.request.overrides, *overrides])
        return resolve(self.request.output, with_default_kinds(self._placed(root)), problems)

    def text(self) -> str:
        """Return the recipe as YAML, its sections in the order of the schema."""
        name, source = shlex.quote(str(self.request.output)), shlex.quote(str(self.request.source))
        title = f"By `trainer init {source}`. Check it: trainer check {name}. Train it: trainer run {name}"
        values = self._placed(override_layer(self.request.overrides)[0]).plain()
        order = [key for key in ORDER if key in values]
        return recipe_text({key: values[key] for key in dict.fromkeys((*order, *values))}, self.comments, title)

    def _placed(self, layer: Node) -> Node:
        folder = Path(os.path.abspath(self.request.output)).parent
        proposed = parse(json.dumps(self.values), Origin("proposal"), places=False)[0]
        return parse(json.dumps(merged(proposed, layer).plain()), Origin("proposal", folder=folder), places=False)[0]


ORDER = ("name", "task", "model", "data", "precision", "training", "optimizer", "schedule")


def recipe_text(values: Mapping[str, Any], comments: Mapping[str, str], title: str) -> str:
    """Return the text of a recipe.

    Args:
        values: JSON values by their keys.
        comments: the comment of a key, by its dotted path.
        title: the comment at the top.
    """
    return "\n".join([_comment(title), *_lines(values, comments, ""), ""])


def _comment(text: str) -> str:
    """Return a comment on one line; names of columns and files may hold line breaks."""
    return "# " + "".join(one if one.isprintable() else " " for one in text)


def _lines(values: Mapping[str, Any], comments: Mapping[str, str], path: str) -> Iterator[str]:
    indent = "  " * path.count(".")
    for key, value in values.items():
        comment = f"  {_comment(comments[path + key])}" if path + key in comments else ""
        is_section = isinstance(value, dict) and value
        yield f"{indent}{_scalar(key)}:{'' if is_section else ' ' + _flow(value)}{comment}"
        if is_section:
            yield from _lines(value, comments, f"{path}{key}.")


def _flow(value: Any) -> str:
    return f"[{', '.join(map(_flow, value))}]" if isinstance(value, list) else _scalar(value)


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    shown = json.dumps(value, ensure_ascii=False)
    return shown if shown.isprintable() else json.dumps(value)
