"""Shapes of well-known models, which come with the package: plans and checks of these models need no network.

A shape replaces a configuration that is not in the hub's cache. Only `plan`, `rehearse` and `check` use it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from trainer.base.extensions import registered
from trainer.recipe.plan import RunPlan
from trainer.recipe.schema import Recipe
from trainer.tools.plan.reachable import is_here

_FILE = Path(__file__).parent / "shapes.json"


def known_shapes() -> list[str]:
    """Return the names of the models with a shape."""
    return list(_rows())


def shape_of(name: str) -> dict[str, Any]:
    """Return the values of the `config.json` of a known model, without defaults of its type."""
    row = _rows()[name]
    return {**(shape_of(row["like"]) if "like" in row else {}), **row.get("config", {})}


def head_of(name: str) -> str:
    """Return the auto class of transformers with the published number of parameters."""
    row = _rows()[name]
    return str(row.get("head") or (head_of(row["like"]) if "like" in row else "AutoModel"))


def parameters_of(name: str) -> int:
    """Return the published number of parameters of a known model."""
    return int(_rows()[name]["parameters"])


def shipped_models(recipe: Recipe) -> dict[str, str]:
    """Return the models of a recipe that need a shape of the package, by the key of their name."""
    keys = ["model.name_or_path", *(row.name for row in registered("second_model"))]
    found = {}
    for key in keys:
        section, _, field = key.partition(".")
        values = getattr(recipe, section)
        name, revision = getattr(values, field, None), getattr(values, "revision", None)
        if name in _rows() and revision is None and not is_here(name):
            found[key] = str(name)
    return found


def shape_notes(recipe: Recipe) -> list[str]:
    """Return a note on each model with a shape of the package."""
    return [
        f"the shape of {name} comes with the package; a configuration in the hub's cache would have precedence"
        for name in dict.fromkeys(shipped_models(recipe).values())
    ]


def shaped(plan: RunPlan) -> RunPlan:
    """Return the plan of a run with the folders of shapes in place of names that are not on this machine."""
    recipe = plan.recipe
    for key, name in shipped_models(recipe).items():
        section, _, field = key.partition(".")
        values = getattr(recipe, section)
        changes: dict[str, Any] = {field: _folder(name)}
        if section == "model":
            changes["tokenizer"] = values.tokenizer or name  # the folder has none
        recipe = recipe.model_copy(update={section: values.model_copy(update=changes)})
    return plan if recipe is plan.recipe else replace(plan, recipe=recipe)


def _folder(name: str) -> str:
    """Return a folder with the `config.json` of a model, which lasts as long as this process."""
    folder = Path(_temporary().name, name)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape_of(name)), encoding="utf-8")
    return str(folder)


@cache
def _temporary() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="trainer-shapes-")


@cache
def _rows() -> dict[str, dict[str, Any]]:
    return dict(json.loads(_FILE.read_text(encoding="utf-8"))["models"])
