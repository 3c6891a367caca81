"""The key of the section `checkpoint` of a recipe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from trainer.recipe.schema import Recipe, Section
from trainer.recipe.schema.checkpoint import unknown_placeholders, with_name
from trainer.recipe.schema.fields import PathOrUrl
from trainer.recipe.schema.section import Contradiction


class MirrorKeys(Section):
    """The place of copies."""

    mirror: PathOrUrl | None = None
    """Place of copies of the checkpoints and the final model, for fsspec, such as `s3://bucket/{name}`, where
    `{name}` is the name of the run. A run without a checkpoint in its folder resumes from there."""

    def contradictions(self) -> Iterator[Contradiction]:
        if self.mirror is not None:
            yield from unknown_placeholders("checkpoint.mirror", self.mirror)


def place_of(recipe: Recipe) -> str:
    """Return the place of copies of a recipe that names one."""
    place = cast(MirrorKeys, recipe.checkpoint).mirror
    assert place is not None
    return with_name(place, recipe.name)
