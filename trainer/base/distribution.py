"""Installed distributions, and the one that holds this package. On PyPI, `trainer` is another project."""

from __future__ import annotations

from functools import cache
from importlib import metadata

DISTRIBUTION = "recipe-trainer"


def install_command(*extras: str) -> str:
    """Return the command that installs the packages of `extras`."""
    return f'pip install "{DISTRIBUTION}[{",".join(extras)}]"'


version = cache(metadata.version)  # a look takes milliseconds, and a run takes dozens of them


def installed(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return version(package)
    except metadata.PackageNotFoundError:
        return None
