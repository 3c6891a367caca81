"""Installed distributions, and the one that holds this package. On PyPI, `trainer` is another project."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "recipe-trainer"


def install_command(*extras: str) -> str:
    """Return the command that installs the packages of `extras`."""
    return f'pip install "{DISTRIBUTION}[{",".join(extras)}]"'


def installed(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
