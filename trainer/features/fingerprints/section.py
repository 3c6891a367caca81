"""The key of the section `logging` of a recipe."""

from __future__ import annotations

from trainer.recipe.schema import Section


class FingerprintKeys(Section):
    """The record of tensors for `trainer certify`."""

    fingerprints: bool = False
    """Write a few numbers of each output, gradient and update of the first 16 steps into the folder `fingerprints`."""
