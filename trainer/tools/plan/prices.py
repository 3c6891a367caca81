"""Prices of GPUs for an hour, of the package or of the user's file. This module imports no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.base.errors import UsageError
from trainer.recipe.reading.files import read_file
from trainer.tools.plan.hardware import parse_devices

_FILE = Path(__file__).parent / "prices.json"
_ROW_KEYS = {"price", "spot", "date", "source"}
_MONEY = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]{3})?")
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(min|h|d)")
_HOURS = {"min": 1 / 60, "h": 1.0, "d": 24.0}
_FORM = "write `currency: USD` and, under `gpus`, a price for each name, such as `H100: 2.5`"


@dataclass(frozen=True)
class Prices:
    """The prices of one GPU for an hour by its name: on demand, and of an instance that may be interrupted."""

    currency: str
    on_demand: Mapping[str, float]
    spot: Mapping[str, float]
    source: str  # for the user

    @classmethod
    def read(cls, file: Path | None) -> Prices:
        """Read a file of prices; None: those of the package.

        Raises:
            UsageError: the file cannot be read, or has another form.
        """
        values = _values(file or _FILE)
        currency, gpus = values.get("currency"), values.get("gpus")
        if not isinstance(currency, str) or not re.fullmatch("[A-Z]{3}", currency):
            raise _wrong(file, "currency", currency)
        if not isinstance(gpus, dict) or not gpus:
            raise _wrong(file, "gpus", gpus)
        on_demand, spot = {}, {}
        for written, row in gpus.items():
            try:
                name = parse_devices(str(written)).name
            except UsageError as error:
                text = str(error).replace("`--gpus`", "a name in `gpus`")
                raise UsageError(f"`--prices` names the file {file}: {text}") from error
            if name in on_demand:
                raise UsageError(f"`--prices` names the file {file}, in which {name} has two prices; keep one")
            if isinstance(row, dict) and (unknown := {*row} - _ROW_KEYS):
                raise _wrong(file, f"gpus.{written}.{min(map(str, unknown))}", "no key of a price")
            price = row.get("price") if isinstance(row, dict) else row
            on_demand[name] = _positive(file, f"gpus.{written}", price)
            if isinstance(row, dict) and "spot" in row:
                spot[name] = _positive(file, f"gpus.{written}.spot", row["spot"])
        days = {row["date"] for row in gpus.values() if isinstance(row, dict) and isinstance(row.get("date"), str)}
        read = f", read on {max(days)}" if days else ""
        source = f"list prices of the package{read}; --prices FILE replaces them" if file is None else f"{file}{read}"
        return cls(currency, on_demand, spot, source)


def _values(file: Path) -> dict[str, Any]:
    node, problems = read_file(file)
    if problems:
        raise UsageError(f"`--prices` names the file {file}, which cannot be read: {problems[0].text}; {_FORM}")
    values = node.plain()
    if not isinstance(values, dict):
        raise UsageError(f"`--prices` names the file {file}, which is no table; {_FORM}")
    return values


def _wrong(file: Path | None, key: str, value: object) -> UsageError:
    return UsageError(f"`--prices` names the file {file}, in which `{key}` is {value!r:.60}; {_FORM}")


def _positive(file: Path | None, key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise _wrong(file, key, value)
    return float(value)


def budget(text: str, currency: str) -> float:
    """Return an amount such as `50USD` or `50`, in the currency of the prices.

    Raises:
        UsageError: the text has another form or another currency.
    """
    match = _MONEY.fullmatch(text.strip())
    if match is None or not 0 < float(match[1]) < math.inf:
        raise UsageError(f"`--at-most` is {text!r}; write an amount above 0, such as 50{currency}")
    if match[2] and match[2].upper() != currency:
        raise UsageError(
            f"`--at-most` is {text!r}, but the prices are in {currency}; write an amount in {currency}, or prices in"
            f" {match[2].upper()} by --prices FILE"
        )
    return float(match[1])


def hours_of(option: str, text: str) -> float:
    """Return the hours of a text such as `6h`, `90min` or `2d`.

    Raises:
        UsageError: the text has another form.
    """
    match = _TIME.fullmatch(text.strip())
    if match is None or not 0 < float(match[1]) < math.inf:
        raise UsageError(f"`{option}` is {text!r}; write a time above 0 with its unit, such as 6h, 90min or 2d")
    return float(match[1]) * _HOURS[match[2]]
