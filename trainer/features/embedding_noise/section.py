"""The key of the section `model` of a recipe, and its rule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, cast

from pydantic import Field

from trainer.recipe.schema import Model, Section, TaskSection
from trainer.recipe.schema.section import Contradiction, clash


class NoiseKeys(Section):
    """The scale of the noise."""

    neftune_alpha: Annotated[float, Field(gt=0)] | None = None
    """causal_lm: noise within `alpha / sqrt(L * width)` on the embeddings of L tokens, such as 5 (NEFTune, Jain et al.
    2023)."""


def alpha_of(model: Model) -> float | None:
    """Return the scale of the noise in the section `model`; None: no noise."""
    return cast(NoiseKeys, model).neftune_alpha


def contradictions(task: TaskSection, model: Model) -> Iterator[Contradiction]:
    if alpha_of(model) is not None and not task.traits.noise:
        text = f"applies to causal language models, but `task.type` is {task.type}; set it to null"
        yield clash(text, "model.neftune_alpha", "task.type")
