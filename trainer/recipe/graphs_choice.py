"""The choice of `cuda_graphs: auto`; plans and runs on GPUs import it."""

from __future__ import annotations

import json

from trainer.recipe.combinations import EXCLUSIONS
from trainer.recipe.schema import Recipe

LEAST_HOST_SHARE = 0.9
"""The share of a step that the host takes at least if its passes are captured."""

_KEY = "cuda_graphs"


def auto_obstacle(recipe: Recipe) -> str | None:
    """Return the reason for which `auto` captures no passes of a recipe; None: there is none."""
    if recipe.cuda_graphs is not True:
        recipe = recipe.model_copy(update={_KEY: True})
    sections = {name: getattr(recipe, name) for name in type(recipe).model_fields}
    for row in EXCLUSIONS:
        conditions = (row.first, row.second)
        if any(condition.key == _KEY for condition in conditions) and row.message(sections) is not None:
            other = next(condition for condition in conditions if condition.key != _KEY)
            return f"`{other.key}` is {json.dumps(other.value(sections))}: {row.reason}"
    if getattr(recipe.task, "packing", "none") == "documents":
        return '`task.packing` is "documents": the host reads the lengths of each row'
    if not recipe.training.layout_invariant_dropout:
        # Torch's generator stays in the state of a capture that fails.
        return "`training.layout_invariant_dropout` is false: a failed capture would disturb torch's random numbers"
    return None


def coarser_padding(max_length: int | None, longest: int, most_shapes: int) -> int | None:
    """Return the smallest `data.pad_to` with which texts have at most so many widths; None without texts.

    Args:
        max_length: the recipe's, which a `data.pad_to` must divide.
        longest: the tokens of the longest row.
    """
    if max_length is None:
        return None
    return next(n for n in range(1, max_length + 1) if max_length % n == 0 and -(-longest // n) <= most_shapes)
