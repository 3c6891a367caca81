"""The distribution that holds this package. On PyPI, `trainer` is another project."""

from __future__ import annotations

DISTRIBUTION = "recipe-trainer"


def install_command(*extras: str) -> str:
    """Return the command that installs the packages of `extras`."""
    return f'pip install "{DISTRIBUTION}[{",".join(extras)}]"'
