"""The options of `trainer plan --gpus any`. This module imports no torch, so that its errors come at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainer.base.errors import UsageError
from trainer.tools.plan.prices import Prices, budget, hours_of

ANY = "any"


@dataclass(frozen=True)
class MachineRequest:
    """A recipe, and the limits of the machines to find for it."""

    recipe: str
    overrides: tuple[str, ...] = ()
    length: int | None = None
    rows: int | None = None
    within: float | None = None  # hours
    at_most: float | None = None  # in the currency of the prices
    prices: Path | None = None
    spot: float | None = None  # the mean hours between two interruptions of a machine
    rates: str | None = None  # the file of corrected rates; None: that of the user's cache
    most_plans: int = 60

    @classmethod
    def of(
        cls, recipe: str, overrides: tuple[str, ...], length: int | None, rows: int | None, limits: MachineLimits
    ) -> MachineRequest:
        """Return the request of options as texts.

        Raises:
            UsageError: one has another form.
        """
        within = None if limits.within is None else hours_of("--within", limits.within)
        at_most = limits.at_most and budget(limits.at_most, Prices.read(limits.prices).currency)
        spot = None if limits.spot is None else hours_of("--spot", limits.spot)
        return cls(
            recipe, overrides, length, rows, within, at_most or None, limits.prices, spot, limits.rates, limits.plans
        )

    def allows(self, hours: float, price: float | None) -> bool:
        """Return whether a choice is within the limits; one without a price is outside of a budget."""
        return hours <= (self.within or math.inf) and (
            self.at_most is None or (price is not None and price <= self.at_most)
        )

    def order(self, hours: float, price: float | None) -> tuple[bool, float, float]:
        """Return the key by which choices are sorted: the cheapest first; with a budget alone, the fastest first."""
        known = math.inf if price is None else price
        if self.at_most is not None and self.within is None:
            return False, hours, known
        return price is None, known, hours


def require_unused(options: Mapping[str, object]) -> None:
    """Refuse options of given devices, by their names."""
    if given := [name for name, value in options.items() if value]:
        raise UsageError(f"`{given[0]}` is for given devices, but `--gpus` is {ANY}; leave it out, or name devices")


@dataclass(frozen=True)
class MachineLimits:
    """The options of `--gpus any` as they were written."""

    within: str | None = None
    at_most: str | None = None
    prices: Path | None = None
    spot: str | None = None
    everything: bool = False
    rates: str | None = None  # also of other devices
    plans: int = 60

    def require_any(self, gpus: str) -> None:
        """Refuse the options beside other devices than `any`."""
        for option, value in (
            ("--within", self.within), ("--at-most", self.at_most), ("--prices", self.prices), ("--spot", self.spot),
            ("--all", self.everything or None),
        ):  # fmt: skip
            if value is not None:
                raise UsageError(f"`{option}` chooses among devices, but `--gpus` is {gpus}; use --gpus any")
