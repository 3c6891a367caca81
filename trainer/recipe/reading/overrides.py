"""`key=value` arguments of the command line as a layer over the recipe."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from trainer.base.errors import RecipeError
from trainer.recipe.paths import KeyPath, shown_key, shown_value
from trainer.recipe.reading.parser import MAX_DEPTH, Node, Origin, Problem, parse, printable, unusable_text


def override_layer(overrides: Sequence[str]) -> tuple[Node, list[Problem]]:
    """Return the arguments as an object, and the invalid arguments.

    A value that is valid JSON is parsed; any other is a string. Examples: `training.epochs=1`, `evaluation.every=null`,
    `evaluation.every=100 steps`, `logging.to=["console"]`, `name="7"`.
    """
    origin = Origin("command line", folder=Path(os.path.abspath(".")))
    root = Node({}, origin)
    problems: list[Problem] = []
    for override in overrides:
        problem = unusable_text(override) or _malformed(override)
        if problem is None:
            key, _, text = override.partition("=")
            path = tuple(key.split("."))
            value, issue = _value(text, path, origin)
            problems += issue
            problem = _put(root, path, value)
        if problem is not None:
            problems.append(Problem(origin, f"`{shown_key(printable(override))}` {problem}"))
    return root, problems


def _malformed(override: str) -> str | None:
    key, equals, _ = override.partition("=")
    if key.startswith("-"):
        from trainer.recipe.reading.suggesting import suggestion

        meant = suggestion(key.lstrip("-"))
        return f"is not an option; as a key it {meant}" if meant else "is neither an option nor an override key=value"
    if not equals:
        return "is not an override; write key=value, such as training.epochs=1"
    if not all(key.split(".")):
        return "has an empty part in its key; write key=value, such as training.epochs=1"
    if key.count(".") >= MAX_DEPTH:
        return f"is nested deeper than the limit of {MAX_DEPTH} levels"
    if key in ("extends", "$schema"):
        return "is valid only in a recipe file"
    return None


def _value(text: str, path: KeyPath, origin: Origin) -> tuple[Node, list[Problem]]:
    try:
        # Text that is no JSON stays a text, so that the shell needs no quotes.
        return parse(text, origin, path, places=False)
    except RecipeError:
        return Node(text, origin), []


def _put(root: Node, parts: tuple[str, ...], value: Node) -> str | None:
    """Set the value at a key path; return the problem if another override already set it."""
    node = root
    for part in parts[:-1]:
        node = node.members.setdefault(part, Node({}, root.origin))
        if not isinstance(node.value, dict):
            return f"conflicts with another override, which sets `{shown_key(part)}` to {shown_value(node.plain())}"
    if parts[-1] in node.members:
        return "is the second override of this key; keep one"
    node.members[parts[-1]] = value
    return None
