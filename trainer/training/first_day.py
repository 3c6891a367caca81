"""The date that a chat template writes as today's: a run keeps that of its first start, which its checkpoints name."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.checkpoint.registered import registered_tiers
from trainer.checkpoint.store import CheckpointStore
from trainer.recipe.schema import Recipe
from trainer.training.process_group import collective_timeout, together

if TYPE_CHECKING:
    from trainer.ranks.joining import Rendezvous


def first_day(recipe: Recipe, rank: int, meeting: Rendezvous | None) -> str | None:
    """Return the date of the first start of a run, as rank 0 finds it; None if no rows need it. All ranks must call it.

    Raises:
        TrainerError: a place of checkpoints does not answer; on every rank.
    """
    if recipe.data.date is not None or not recipe.task.traits.chats:
        return None

    def find() -> str | None:
        # Rank 0 alone asks: hosts may have different dates around midnight.
        return None if rank else _saved(recipe) or date.today().isoformat()

    day = together(meeting, recipe, find)
    return day if meeting is None else meeting.share(day, collective_timeout(recipe).total_seconds())


def _saved(recipe: Recipe) -> str | None:
    """Return the date in the newest checkpoint from which a run may resume."""
    if recipe.checkpoint.resume == "never":
        return None
    store = CheckpointStore(Path(recipe.checkpoint.folder), recipe.checkpoint.keep)
    if facts := store.newest_facts():
        return _day_of(facts.origin)
    origins = (tier.newest_facts(recipe).get("origin") for tier in registered_tiers(recipe))
    return next(filter(None, map(_day_of, origins)), None)


def _day_of(origin: object) -> str | None:
    """Return `data.date` of the recipe in the facts of a checkpoint."""
    value: Any = origin
    for key in ("recipe", "data", "date"):
        value = value.get(key) if isinstance(value, Mapping) else None
    with suppress(TypeError, ValueError):
        return date.fromisoformat(value).isoformat()
    return None
