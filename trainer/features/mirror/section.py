"""The key of the section `checkpoint` of a recipe."""

from __future__ import annotations

from typing import cast

from trainer.recipe.schema import Recipe, Section
from trainer.recipe.schema.fields import PathOrUrl


class MirrorKeys(Section):
    """The place of copies."""

    mirror: PathOrUrl | None = None
    """Place of copies of the checkpoints and the final model, for fsspec, such as `s3://bucket/{name}`, where
    `{name}` is the name of the run. A run without a checkpoint in its folder resumes from there."""


def place_of(recipe: Recipe) -> str:
    """Return the place of copies of a recipe that names one."""
    place = cast(MirrorKeys, recipe.checkpoint).mirror
    assert place is not None
    return place.replace("{name}", recipe.name)
