"""Other distributions with a package `trainer`; pip lets one write files over those of another."""

from __future__ import annotations

import os
from pathlib import Path

from trainer.base.errors import UsageError

_FOLDERS = ("trainer-", "coqui_tts_trainer-")  # of metadata; the two on PyPI


def refuse_collisions(packages: Path) -> None:
    """Raise if the folder that holds this package holds another of the same name.

    Args:
        packages: a folder such as `site-packages`.

    Raises:
        UsageError: the error names the other distribution.
    """
    for name in os.listdir(packages):
        if name.startswith(_FOLDERS) and name.endswith(".dist-info"):
            other, _, version = name.removesuffix(".dist-info").partition("-")
            raise UsageError(collision(f"{other.replace('_', '-')} {version}"))


def collision(other: str) -> str:
    """Return the error for files of `other` among those of this package."""
    return (
        f"the package {other} installs into the folder `trainer` too, so files of both are lost; uninstall it and"
        " recipe-trainer, then install each into an environment of its own"
    )
