"""Merging of the layers of a recipe: the recipes that it extends, the recipe, the command line.

Objects merge key by key; other values, including lists, are replaced. If a later layer changes the *kind* of a section
(`task.type`, `data.source`, `optimizer.name`), an earlier key stays only if the new kind has the key with the same type
and meaning. From hub to files, `data.max_length` stays, but `data.train` (a split, then a file) does not. A new
`model_type` replaces all of `model.config`.
"""

from __future__ import annotations

from pydantic.fields import FieldInfo

from trainer.recipe.paths import KeyPath
from trainer.recipe.reading.keys import default_tag, kinds, section_model
from trainer.recipe.reading.parser import DEFAULT, Node
from trainer.recipe.schema import Recipe, Section
from trainer.recipe.schema.section import descriptions


def _shown_kind(field: FieldInfo, node: Node) -> str | None:
    """Return the only kind of a section that has all written keys, and needs no other; None: there are several."""
    written, tag = node.members.keys(), str(field.discriminator)
    fitting = [
        kind
        for kind, model in kinds(field).items()
        if written <= model.model_fields.keys()
        and all(key in written or key == tag or not value.is_required() for key, value in model.model_fields.items())
    ]
    return fitting[0] if len(fitting) == 1 else None


def merged(base: Node, layer: Node) -> Node:
    """Merge `layer` over `base`."""
    return _merged((), base, layer, None)


def _merged(path: KeyPath, base: Node, layer: Node, field: FieldInfo | None) -> Node:
    if not isinstance(base.value, dict) or not isinstance(layer.value, dict):
        return layer
    members = dict(_kept(path, base, layer, field))
    section: type[Section] | None = None if path else Recipe
    if field is not None:
        section = section_model(field, Node(members | layer.members, layer.origin))
    for key, node in layer.members.items():
        inner = section.model_fields.get(key) if section else None
        members[key] = _merged((*path, key), members[key], node, inner) if key in members else node
    written = layer if layer.origin.line else base  # the command line has no positions
    return Node(members, written.origin, written.key_origin)


def _kept(path: KeyPath, base: Node, layer: Node, field: FieldInfo | None) -> dict[str, Node]:
    """Return the members of `base` that are valid under the kind that `layer` sets."""
    if path == ("model", "config"):
        old, new = base.members.get("model_type"), layer.members.get("model_type")
        return {} if old and new and old.value != new.value else base.members
    # Only a layer that names the kind can change it.
    if field is None or field.discriminator not in layer.members:
        return base.members
    before, after = section_model(field, base), section_model(field, layer)
    if before is None or after is None or before is after:  # validation reports unknown kinds
        return base.members
    return {key: node for key, node in base.members.items() if _same_key(before, after, key)}


def _same_key(before: type[Section], after: type[Section], key: str) -> bool:
    field, other = before.model_fields.get(key), after.model_fields.get(key)
    if field is None or other is None:
        return False
    meanings = [descriptions(section).get(key) for section in (before, after)]
    return (field.annotation, field.metadata) == (other.annotation, other.metadata) and meanings[0] == meanings[1]


def with_default_kinds(root: Node) -> Node:
    """Set the default kind of sections without one, as pydantic requires."""
    members = dict(root.members)
    for name, field in Recipe.model_fields.items():
        tag = _shown_kind(field, members[name]) if name == "data" and name in members else default_tag(field)
        if tag is not None and name in members and isinstance(members[name].value, dict):
            kind = {str(field.discriminator): Node(tag, DEFAULT)}
            members[name] = Node(kind | members[name].members, members[name].origin, members[name].key_origin)
    return Node(members, root.origin)
