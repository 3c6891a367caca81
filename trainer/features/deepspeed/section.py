"""The key `parallel.deepspeed` of a recipe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field

from trainer.recipe.schema import Section
from trainer.recipe.schema.section import Contradiction


class DeepSpeedKeys(Section):
    """Keys of DeepSpeed's own configuration."""

    deepspeed: dict[str, Any] = Field(default={})
    """Further keys for DeepSpeed under zero1 to zero3, except those that the trainer sets."""

    def contradictions(self) -> Iterator[Contradiction]:
        if self.deepspeed:
            from trainer.features.deepspeed.keys import refused_keys  # it reads tables, which few recipes need

            for path, reason in refused_keys(self.deepspeed):
                yield Contradiction((("parallel", "deepspeed", *path),), reason)
