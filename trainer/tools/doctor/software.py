"""Checks of the installed packages."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import packages_distributions, requires, version
from pathlib import Path
from typing import TYPE_CHECKING

import trainer
from trainer.base.collisions import collision
from trainer.base.distribution import DISTRIBUTION, installed
from trainer.tools.doctor.finding import Finding, ok, problem, warning
from trainer.tools.doctor.machine import Machine

if TYPE_CHECKING:
    from packaging.requirements import Requirement


def trainer_itself(machine: Machine) -> Finding:
    """The version of `trainer` and the folder that it was imported from, Python and the platform."""
    folder = Path(trainer.__file__).parent
    inside = f", {machine.container} container" if machine.container else ""
    value = (
        f"{trainer.__version__} from {folder}, Python {platform.python_version()}, {platform.system()}"
        f" {platform.release()} {platform.machine()}{inside}"
    )
    remedy = f"pip install -e {folder.parent}"
    found = installed(DISTRIBUTION)
    if others := {*packages_distributions().get("trainer", [])} - {DISTRIBUTION}:
        other = min(others)
        return problem(collision(f"{other} {version(other)}"), f"pip uninstall {other} {DISTRIBUTION}")
    if found is None:
        return warning(f"{value}, not installed as a package, so the ranges of its dependencies are unknown", remedy)
    if found != trainer.__version__:
        return warning(f"{value}, but {found} is installed", remedy)
    return ok(value)


def dependencies(machine: Machine) -> Finding:
    """The dependencies of `trainer`, compared with the ranges of its metadata."""
    needed = list(_requirements())
    wrong = {requirement: why for requirement in needed if (why := _wrong(requirement))}
    if wrong:
        return problem(
            ", ".join(wrong.values()), "pip install " + " ".join(f'"{one.name}{one.specifier}"' for one in wrong)
        )
    return ok(", ".join(f"{requirement.name} {version(requirement.name)}" for requirement in needed))


def _requirements() -> Iterator[Requirement]:
    """Yield the requirements of the package itself, without those of extras."""
    from packaging.requirements import Requirement

    for requirement in map(Requirement, (requires(DISTRIBUTION) or []) if installed(DISTRIBUTION) else []):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement


def _wrong(requirement: Requirement) -> str | None:
    """Return the error of an installed package, or None; a vendor's pre-release counts as its release."""
    from packaging.version import Version

    found = installed(requirement.name)
    if found is None:
        return f"{requirement.name} is not installed"
    if not requirement.specifier.contains(Version(found).base_version):
        return f"{requirement.name} {found} is not {requirement.specifier}"
    return None
