"""The options of `trainer plan` as one request. This module imports no torch, so that its errors come at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainer.base.errors import UsageError
from trainer.tools.plan.hardware import Devices
from trainer.tools.writing import require_new_recipe

_REPLACED = {
    "batch": ("training.global_batch_size", "training.micro_batch_size"), "length": ("data.max_length",),
}  # fmt: skip
"""The keys that `--largest` sets."""


@dataclass(frozen=True)
class PlanRequest:
    """A recipe, devices, and the plans to make of them; the fields are options of `trainer plan`."""

    recipe: str
    given: tuple[str, ...]  # overrides
    devices: Devices
    is_auto: bool  # whether to find the fewest devices
    nodes: int
    length: int | None
    rows: int | None
    price: float | None
    timeline: Path | None
    search: bool
    any_precision: bool
    largest: Literal["batch", "length", "model"] | None
    most_plans: int
    write: Path | None
    most_changes: int

    @property
    def overrides(self) -> tuple[str, ...]:
        """The overrides of the user, without those that `--largest` replaces."""
        return tuple(word for word in self.given if word not in self.replaced)

    @property
    def replaced(self) -> tuple[str, ...]:
        """The overrides of the user that `--largest` replaces."""
        keys = _REPLACED.get(self.largest or "", ())
        return tuple(word for word in self.given if word.partition("=")[0] in keys)

    def check(self) -> None:
        """Refuse options that contradict each other."""
        if self.write is not None and not (self.search or self.largest or self.is_auto):
            raise UsageError("`--write` writes a layout that was found; add --search, --largest or --gpus autoxMEMORY")
        if self.write is not None:
            require_new_recipe(self.write, "--write")
        if self.largest is not None and (self.search or self.is_auto):
            raise UsageError(
                "`--largest` takes the layout of the recipe; leave out --search, and give a number of GPUs"
            )
        for option, value in (
            ("--rows", self.rows), ("--price-per-gpu-hour", self.price), ("--timeline", self.timeline),
        ):  # fmt: skip
            if self.search and value is not None:
                raise UsageError(
                    f"`{option}` is {value}, but a search shows no single layout; plan the layout that it finds"
                )
        if self.any_precision and not self.search:
            raise UsageError("`--also` is precision, but only a search changes it; add --search")
