"""Installed distributions, and the one that holds this package. On PyPI, `trainer` is another project."""

from __future__ import annotations

import platform
from functools import cache
from importlib import metadata

import trainer
from trainer.base import extensions

DISTRIBUTION = "recipe-trainer"

COMPARED = ("torch", "transformers", "datasets", "tokenizers", "safetensors")
"""Packages that must have the same version on all ranks."""

_RECORDED = (*COMPARED, "accelerate", "deepspeed", "numpy")


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


def versions() -> dict[str, str]:
    """Return the versions that a run names: of trainer, Python, the packages it uses, and those that extend it."""
    packages = {package: installed(package) for package in _RECORDED}
    interpreter = {"trainer": trainer.__version__, "python": platform.python_version()}
    extending = dict(package.rsplit(" ", 1) for package in extensions.packages().values())
    return interpreter | {package: number for package, number in packages.items() if number is not None} | extending
