"""A recipe in the making: values with comments, beneath the overrides of the user."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from trainer.base.errors import UsageError
from trainer.base.text import dotted_leaves
from trainer.recipe.reading.files import recipe_endings, recipe_formats
from trainer.recipe.reading.loading import ResolvedRecipe, resolve
from trainer.recipe.reading.merging import merged, with_default_kinds
from trainer.recipe.reading.overrides import override_layer
from trainer.recipe.reading.parser import Node, Origin, parse
from trainer.tools.writing import recipe_name, recipe_text, require_new_recipe


def recipe_place(source: Path, output: Path | None, overwrite: bool = False) -> Path:
    """Return the file of the recipe; None: the name of the data, in the current folder.

    Raises:
        UsageError: the file exists and is not to be replaced, or its ending is not that of a format with comments.
    """
    endings = tuple(recipe_formats()) or recipe_endings()
    place = output or Path(recipe_name(source) + endings[0])
    if place.is_file() and not overwrite:
        raise UsageError(f"{place} exists; add --overwrite to replace it, or name another file by --output")
    if not place.is_file():
        require_new_recipe(place, "--output", endings)
    return place


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

    @property
    def given_columns(self) -> dict[str, Any]:
        """The columns of the text and of the label that the overrides name."""
        return {key: self.given[f"task.{key}"] for key in ("text", "label") if f"task.{key}" in self.given}


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
        """Return the text of the recipe, its sections in the order of the schema."""
        name, source = shlex.quote(str(self.request.output)), shlex.quote(str(self.request.source))
        title = f"By `trainer init {source}`. Check it: trainer check {name}. Train it: trainer run {name}"
        values = self._placed(override_layer(self.request.overrides)[0]).plain()
        order = [key for key in ORDER if key in values]
        values = {key: values[key] for key in dict.fromkeys((*order, *values))}
        if "type" in values.get("task", {}):  # first, also where the user gives it
            values["task"] = {"type": values["task"]["type"], **values["task"]}
        return recipe_text(self.request.output, values, self.comments, title)

    def _placed(self, layer: Node) -> Node:
        folder = Path(os.path.abspath(self.request.output)).parent
        proposed = parse(json.dumps(self.values), Origin("proposal"), places=False)[0]
        return parse(json.dumps(merged(proposed, layer).plain()), Origin("proposal", folder=folder), places=False)[0]


ORDER = ("name", "task", "model", "data", "precision", "training", "optimizer", "schedule")
