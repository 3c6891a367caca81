"""The key of the section `logging` of a recipe, and its rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, cast

from pydantic import Field

from trainer.recipe.schema import Logging, Section, Training
from trainer.recipe.schema.section import Contradiction, clash


class Profile(Section):
    """Profile of some steps by torch's profiler: a trace of each rank, and the operations that take most time."""

    steps: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=2, max_length=2)]
    """First and last step to profile, such as [10, 14]."""


class ProfileKeys(Section):
    """The steps to profile."""

    profile: Profile | None = None
    """Steps to profile into the folder `profile` of the run; null: none."""

    def contradictions(self) -> Iterator[Contradiction]:
        first, last = self.profile.steps if self.profile else (1, 1)
        if first > last:
            text = f"must be the first and the last step, but is [{first}, {last}]; use [{last}, {first}]"
            yield clash(text, "logging.profile.steps")


def contradictions(logging: Logging, training: Training) -> Iterator[Contradiction]:
    profile = cast(ProfileKeys, logging).profile
    first, last = profile.steps if profile else (1, 1)
    if training.max_steps is not None and training.max_steps < first <= last:
        text = f"begins at step {first}, but `training.max_steps` is {training.max_steps}; use an earlier step"
        yield clash(text, "logging.profile.steps", "training.max_steps")
