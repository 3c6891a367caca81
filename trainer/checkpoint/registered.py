"""The tiers that features add: each is registered under the key of a recipe that asks for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from trainer.checkpoint.disk import Disk
from trainer.checkpoint.tier import Tier
from trainer.parallel.mesh import ParallelMesh
from trainer.ranks.environment import LaunchEnvironment
from trainer.recipe.registered import asked_for
from trainer.recipe.schema import Recipe

if TYPE_CHECKING:
    from trainer.ranks.joining import Rendezvous


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
    """The parts of a feature that keeps checkpoints in another place: its tier, and the questions before a run.

    Attributes:
        kept: the number of checkpoints that it keeps in the memory of each host.
    """

    kept = 0

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

    def notes(self, recipe: Recipe, model: nn.Module | None) -> list[str]:
        """Return notes of a check of this machine, which need not be one of the run; `model` is on `meta`."""
        return []

    def hand_over(
        self, recipe: Recipe, meeting: Rendezvous, everyone: LaunchEnvironment, num_training: int, seconds: float
    ) -> list[str]:
        """Move what the first `num_training` ranks need from hosts of other ranks, and return notes. All ranks call it.

        Raises:
            TrainerError: A rank has gone for longer than `seconds`.
        """
        return []

    def free(self, recipe: Recipe) -> None:
        """Remove from this host what `hand_over` has kept, after the run."""


def registered_tiers(recipe: Recipe) -> list[TierFeature]:
    """Return the features with a value at their keys; others are not imported."""
    return [tier() for tier in asked_for("tier", recipe)]


def kept_in_memory(recipe: Recipe) -> int:
    """Return the number of checkpoints that stay in the memory of each host."""
    return sum(tier.kept for tier in registered_tiers(recipe))
