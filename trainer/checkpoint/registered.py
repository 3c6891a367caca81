"""The tiers that features add: each is registered under the key of a recipe that asks for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

from trainer.base.extensions import registered, resolved
from trainer.checkpoint.disk import Disk
from trainer.checkpoint.tier import Tier
from trainer.parallel.mesh import ParallelMesh
from trainer.recipe.schema import Recipe


@dataclass(frozen=True)
class TierParts:
    """The parts of a run that a tier is built from.

    `note` shows a note to the user; `is_stopped` returns whether rank 0 has to stop, while a tier waits.
    """

    recipe: Recipe
    disk: Disk
    mesh: ParallelMesh
    note: Callable[[str], None]
    is_stopped: Callable[[], bool]


class TierFeature:
    """The builder of a registered tier."""

    def build(self, parts: TierParts) -> Tier:
        """Return the tier of a run."""
        raise NotImplementedError

    def check(self, recipe: Recipe) -> None:
        """Refuse a place that cannot be used, before the run.

        Raises:
            TrainerError: The place cannot be used.
        """

    def newest_facts(self, recipe: Recipe) -> Mapping[str, Any]:
        """Return the content of `state.json` of the newest checkpoint, before the ranks meet; empty: there is none.

        Raises:
            TrainerError: The place does not answer.
        """
        return {}


def registered_tiers(recipe: Recipe) -> list[TierFeature]:
    """Return the features with a value at their keys; others are not imported."""
    rows = [row for row in registered("tier") if reduce(getattr, row.name.split("."), recipe) is not None]
    return [resolved(row.value)() for row in rows]
