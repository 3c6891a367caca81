"""Rates of devices that runs have corrected: a small file of factors on planned times. This module imports no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.base.errors import UsageError
from trainer.ranks.environment import cache_folder
from trainer.tools.plan.hardware import Devices
from trainer.tools.writing import write_over

NO_RATES = "none"


def rates_file(given: str | None) -> Path | None:
    """Return the file of corrected rates: the given one, or that of the user's cache; None for `none`."""
    if given is not None:
        return None if given == NO_RATES else Path(given)
    return cache_folder() / "rates.json"


def read_rates(file: Path) -> dict[str, dict[str, Any]]:
    """Return the rows of a file by devices; empty if it does not exist.

    Raises:
        UsageError: it has another form.
    """
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(f"`--rates` names the file {file}, which cannot be read ({error}); remove it") from error
    factors = [row.get("factor") if isinstance(row, dict) else None for row in _values(rows)]
    if not isinstance(rows, dict) or not all(isinstance(one, int | float) and 0 < one < math.inf for one in factors):
        raise UsageError(
            f"`--rates` names the file {file}, which has no positive `factor` for each device; remove it, and write it"
            " by `trainer plan --calibrate RUN`"
        )
    return rows


def _values(rows: Any) -> list[Any]:
    return list(rows.values()) if isinstance(rows, dict) else []


def corrected(devices: Devices, given: str | None) -> Devices:
    """Return devices with the factor of the file of rates, and a note on it for the user.

    Raises:
        UsageError: the given file does not exist, or a file has another form.
    """
    file = rates_file(given)
    if file is None or devices.machine is None:
        return devices
    if given is not None and not file.is_file():
        raise UsageError(f"`--rates` is {given}, which is no file; write it by `trainer plan --calibrate RUN`")
    if (row := read_rates(file).get(devices.name)) is None:
        return devices
    by = f"by the run {row.get('run')} ({file})"
    note = f"times of {devices.name} are {row['factor']:.2f} times those of its rates, {by}"
    return replace(devices, factor=float(row["factor"]), rates_note=note)


def store_rate(file: Path, device: str, row: Mapping[str, Any]) -> None:
    """Write the factor of a device into a file of rates; the other devices stay."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_over(file, json.dumps({**read_rates(file), device: row}, indent=2) + "\n", "--rates")
