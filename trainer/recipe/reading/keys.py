"""Key paths, kinds of sections and path-valued keys, derived from the pydantic models of the schema."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import get_args, get_origin

from pydantic.fields import FieldInfo

from trainer.base.extensions import consume
from trainer.recipe.paths import KeyPath
from trainer.recipe.reading.parser import Node
from trainer.recipe.schema import PathBase, Recipe, Section


def find_node(root: Node, path: KeyPath) -> Node | None:
    """Return the node at `path`, or None if it was not written."""
    node: Node | None = root
    for part in path:
        if node is None:
            return None
        if isinstance(part, int):
            node = node.value[part] if isinstance(node.value, list) and part < len(node.value) else None
        else:
            node = node.members.get(part)
    return node


def nearest_node(root: Node, path: KeyPath) -> Node:
    """Return the node at `path`, or the innermost enclosing node that was written."""
    return next((node for end in range(len(path), 0, -1) if (node := find_node(root, path[:end]))), root)


def section_models(annotation: object) -> tuple[type[Section], ...]:
    """Return the section models of a type: none for a plain value, several for a section with kinds."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return (annotation,)
    return tuple(model for argument in get_args(annotation) for model in section_models(argument))


def is_named(field: FieldInfo) -> bool:
    """Return whether a value of the field is an object of names."""
    return any(get_origin(part) is dict for part in (field.annotation, *_type_parts(field.annotation)))


def kinds(field: FieldInfo) -> dict[str, type[Section]]:
    """Return the kinds of a section by the value of its discriminator ("hub" for `HubData`); empty for other keys."""
    if not isinstance(field.discriminator, str):
        return {}
    models = section_models(field.annotation)
    return {str(get_args(model.model_fields[field.discriminator].annotation)[0]): model for model in models}


def default_tag(field: FieldInfo) -> str | None:
    """Return the default kind of a section; None if the kind is required."""
    if isinstance(field.discriminator, str) and isinstance(field.default, Section):
        return str(getattr(field.default, field.discriminator))
    return None


def section_model(field: FieldInfo, node: Node) -> type[Section] | None:
    """Return the section model of `node`, the value of `field`; None for a plain value or an unknown kind."""
    if not isinstance(field.discriminator, str):
        return next(iter(section_models(field.annotation)), None)
    written = node.members.get(field.discriminator)
    tag = written.value if written else default_tag(field)
    return kinds(field).get(tag) if isinstance(tag, str) else None


def path_base_of(field: FieldInfo) -> PathBase | None:
    """Return the base of relative paths in this key; None if its value is not a path."""
    return next(
        (part for part in (*field.metadata, *_type_parts(field.annotation)) if isinstance(part, PathBase)), None
    )


def _type_parts(annotation: object) -> Iterator[object]:
    for part in get_args(annotation):
        yield part
        yield from _type_parts(part)


@cache
def known_keys() -> tuple[str, ...]:
    """Return every key path of the schema, over all kinds of every section, in schema order."""
    return tuple(dict.fromkeys(_keys_below(Recipe, "")))


# Registrations add keys, so the cached list is dropped.
consume("task", lambda _: known_keys.cache_clear())
consume("optimizer", lambda _: known_keys.cache_clear())
consume("schedule", lambda _: known_keys.cache_clear())
consume("keys", lambda _: known_keys.cache_clear())


def _keys_below(model: type[Section], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        for section in section_models(field.annotation):
            yield from _keys_below(section, f"{prefix}{name}.")
