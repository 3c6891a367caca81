"""Versions of the packages that a training depends on."""

from __future__ import annotations

import platform

from trainer import __version__
from trainer.base.distribution import installed
from trainer.base.extensions import packages

COMPARED = ("torch", "transformers", "datasets", "tokenizers", "safetensors")
"""Packages that must have the same version on all ranks."""

RECORDED = (*COMPARED, "accelerate", "deepspeed", "numpy")
"""Packages that a run names in its summary, its checkpoints and its model card."""


def versions() -> dict[str, str]:
    """Return the versions of trainer, Python, each installed package of `RECORDED` and each package that extends it."""
    found = {package: installed(package) for package in RECORDED}
    own = {"trainer": __version__, "python": platform.python_version()}
    extensions = dict(package.rsplit(" ", 1) for package in packages().values())
    return own | {package: number for package, number in found.items() if number is not None} | extensions
