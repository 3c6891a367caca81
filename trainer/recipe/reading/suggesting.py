"""Suggestions for unknown keys: keys of other tools, typos, keys of other sections."""

from __future__ import annotations

import os
from collections.abc import Iterator
from difflib import get_close_matches

from trainer.recipe.paths import KeyPath, dotted, shown_key, shown_value
from trainer.recipe.reading.keys import kinds, known_keys
from trainer.recipe.reading.other_tools import counterpart
from trainer.recipe.reading.parser import Node, Problem
from trainer.recipe.reading.shipped import is_shipped
from trainer.recipe.schema import Recipe, Section


def unknown_key(path: KeyPath, section: type[Section], node: Node) -> list[Problem]:
    """Return one problem for the key, or one for each key inside it that belongs to another tool."""
    inside = [
        Problem(leaf.key_origin or leaf.origin, f"`{key}` {row}")
        for key, leaf in _leaves(dotted(path), node)
        if node.members and (row := counterpart(key))
    ]
    if inside:
        return inside
    keys = tuple(part for part in path if not isinstance(part, int))
    origin, words = node.key_origin or node.origin, _other_kind(path, section)
    if words is None and dotted(keys) not in known_keys() and is_shipped(os.path.abspath(origin.source)):
        words = "is a key of a feature that is not installed; restore its folder, or copy the recipe without the key"
    words = words or suggestion(dotted(keys)) or f"is not a key; valid keys are {', '.join(section.model_fields)}"
    return [Problem(origin, f"`{dotted(path)}` {words}")]


def suggestion(path: str) -> str | None:
    """Return the message after an unknown key; None if no known key is similar."""
    row = counterpart(path)
    if row is not None:
        return str(row)
    near = _nearest_key(path)
    return f"is not a key; did you mean `{near}`?" if near else None


def _leaves(path: str, node: Node) -> Iterator[tuple[str, Node]]:
    if not node.members:
        yield path, node
    for key, member in node.members.items():
        yield from _leaves(f"{path}.{shown_key(key)}", member)


def _nearest_key(path: str) -> str | None:
    section, _, name = path.rpartition(".")
    by_name: dict[str, list[str]] = {}
    for known in known_keys():
        by_name.setdefault(known.rpartition(".")[2], []).append(known)
    if len(by_name.get(name, ())) == 1:
        return by_name[name][0]
    siblings = {known.rpartition(".")[2]: known for known in known_keys() if known.rpartition(".")[0] == section}
    near = get_close_matches(name, siblings, n=1) or [key for key in siblings if _words(name) <= _words(key)]
    if near:
        return siblings[near[0]]
    far = get_close_matches(name, by_name, n=1, cutoff=0.75)  # keys of other sections must be more similar
    return by_name[far[0]][0] if far and len(by_name[far[0]]) == 1 else None


def _words(name: str) -> set[str]:
    return set(name.split("_"))


def _other_kind(path: KeyPath, section: type[Section]) -> str | None:
    field = Recipe.model_fields[str(path[0])] if len(path) == 2 else None
    models = kinds(field) if field else {}
    owner = next((tag for tag, model in models.items() if path[1] in model.model_fields), None)
    if field is None or owner is None:
        return None
    here = next(tag for tag, model in models.items() if model is section)
    name = f"{path[0]}.{field.discriminator}"
    return f"is a key of `{name}` {shown_value(owner)}, but `{name}` is {shown_value(here)}"
