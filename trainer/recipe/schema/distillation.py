"""The section `distillation`."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from trainer.recipe.schema.fields import HubOrPathField, Revision
from trainer.recipe.schema.section import Contradiction, Section, hub_or_folder


class Distillation(Section):
    """Knowledge distillation (Hinton et al. 2015): learn from the outputs of a frozen teacher beside the labels."""

    teacher: HubOrPathField
    """A trained model of the same task: a name on the hub, or a folder."""
    revision: Revision = None
    temperature: float = Field(2.0, gt=0)
    """Divisor of both models' logits in the divergence."""
    weight: float = Field(0.5, gt=0, le=1)
    """The loss is (1 - weight) * loss of the labels + weight * temperature^2 * divergence."""

    def contradictions(self) -> Iterator[Contradiction]:
        return hub_or_folder("distillation.teacher", self.teacher, self.revision)
