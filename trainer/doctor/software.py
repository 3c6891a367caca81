"""Checks of what is installed."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path
from typing import TYPE_CHECKING

import trainer
from trainer.doctor.finding import Finding, ok, problem, warning
from trainer.doctor.machine import Machine

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_FOR_DEVELOPERS = ("dev", "docs")  # extras that no training needs


def python(machine: Machine) -> Finding:
    """Python and the platform."""
    return ok(
        f"{platform.python_version()} ({platform.python_implementation()}), {platform.system()} {platform.release()}"
        f" {platform.machine()}" + (f", {machine.container} container" if machine.container else "")
    )


def trainer_itself(machine: Machine) -> Finding:
    """The version of `trainer`, and from where it was imported.

    Warning: the code is of another version than the package that is installed, or none is installed, so that the ranges
    of its dependencies are not known. Install it again: `pip install -e .` in a clone.
    """
    folder = Path(trainer.__file__).parent
    value = f"{trainer.__version__} from {folder}"
    remedy = f"pip install -e {folder.parent}"
    try:
        installed = version("trainer")
    except PackageNotFoundError:
        return warning(f"{value}, not installed as a package, so that no ranges are known", remedy)
    if installed != trainer.__version__:
        return warning(f"{value}, but {installed} is installed", remedy)
    return ok(value)


def dependencies(machine: Machine) -> Finding:
    """What `trainer` depends on, against the ranges of its metadata.

    Problem: a package is missing, or outside of its range. Install what the line names.
    """
    needed = list(_requirements(None))
    wrong = [why for requirement in needed if (why := _wrong(requirement))]
    if wrong:
        return problem(", ".join(wrong), f"pip install {_quoted(needed)}")
    return ok(", ".join(f"{requirement.name} {version(requirement.name)}" for requirement in needed))


def extras(machine: Machine) -> Finding:
    """Packages that some recipes need: DeepSpeed, and those to log to.

    Warning: one that is installed is outside of its range.

    Problem: the recipe needs one that is missing or outside of its range. Install what the line names: `pip install
    "trainer[tensorboard]"`.
    """
    present, absent, wrong, needed = [], [], [], False
    for extra in _extras():
        requirements = list(_requirements(extra))
        installed = [requirement for requirement in requirements if _installed(requirement.name)]
        is_needed = extra in _needed_extras(machine)
        if not installed and not is_needed:
            absent.append(extra)
        elif whys := [why for requirement in requirements if (why := _wrong(requirement))]:
            wrong.append((extra, ", ".join(whys)))
            needed |= is_needed
        else:
            present += [f"{requirement.name} {version(requirement.name)}" for requirement in installed]
    if wrong:
        value = "; ".join(why for _, why in wrong)
        remedy = f'pip install "trainer[{",".join(extra for extra, _ in wrong)}]"'
        return problem(f"{value}; the recipe needs it", remedy) if needed else warning(value, remedy)
    parts = [", ".join(present), f"not installed: {', '.join(absent)}" if absent else ""]
    return ok("; ".join(filter(None, parts)) or "none")


def _needed_extras(machine: Machine) -> set[str]:
    if machine.recipe is None:
        return set()
    return {*machine.recipe.logging.to, *(["deepspeed"] if machine.needs_deepspeed else [])}


def _all_requirements() -> list[Requirement]:
    from packaging.requirements import Requirement

    try:
        return [Requirement(line) for line in requires("trainer") or []]
    except PackageNotFoundError:
        return []


def _requirements(extra: str | None) -> Iterator[Requirement]:
    """Those of the package itself, or those that one of its extras adds."""
    for requirement in _all_requirements():
        marker = requirement.marker
        is_always = marker is None or marker.evaluate({"extra": ""})
        if is_always if extra is None else marker is not None and not is_always and marker.evaluate({"extra": extra}):
            yield requirement


def _extras() -> list[str]:
    try:
        named = metadata("trainer").get_all("Provides-Extra") or []
    except PackageNotFoundError:
        return []
    return [extra for extra in named if extra not in _FOR_DEVELOPERS]


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _wrong(requirement: Requirement) -> str | None:
    """What is wrong with the installed package; a vendor's pre-release counts as its release."""
    from packaging.version import Version

    installed = _installed(requirement.name)
    if installed is None:
        return f"{requirement.name} is not installed"
    if not requirement.specifier.contains(Version(installed).base_version):
        return f"{requirement.name} {installed} is not {requirement.specifier}"
    return None


def _quoted(requirements: list[Requirement]) -> str:
    wrong = [requirement for requirement in requirements if _wrong(requirement)]
    return " ".join(f'"{requirement.name}{requirement.specifier}"' for requirement in wrong)
