"""The guard of each run on GPUs: a note if a step is much slower than its plan."""

from __future__ import annotations

import torch

from trainer.observe.builders import ObserverParts
from trainer.observe.observer import Observer


def observer(parts: ObserverParts) -> Observer | None:
    """Return the guard of rank 0; None on CPUs, where a plan would take its time from the training.

    Without a console, nobody sees a note; so it is in the turns of `trainer compare`.
    """
    if parts.environment.rank or "console" not in parts.recipe.logging.to or not torch.cuda.device_count():
        return None
    from trainer.tools.watched_speed import WatchedSpeed

    return WatchedSpeed(parts.recipe, parts.environment, parts.note)
