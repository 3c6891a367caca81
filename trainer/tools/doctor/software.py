"""Checks of the installed packages, and of DeepSpeed."""

from __future__ import annotations

import platform
from collections.abc import Collection, Iterator
from importlib.metadata import metadata, requires, version
from pathlib import Path
from typing import TYPE_CHECKING

import trainer
from trainer.base.distribution import DISTRIBUTION, install_command, installed
from trainer.tools.doctor.facts import DeepSpeedFacts
from trainer.tools.doctor.finding import Finding, bad, ok, problem, warning
from trainer.tools.doctor.machine import Machine
from trainer.tools.doctor.probe import ProbeError

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
    """The version of `trainer`, and the folder that it was imported from."""
    folder = Path(trainer.__file__).parent
    value = f"{trainer.__version__} from {folder}"
    remedy = f"pip install -e {folder.parent}"
    found = installed(DISTRIBUTION)
    if found is None:
        return warning(f"{value}, not installed as a package, so the ranges of its dependencies are unknown", remedy)
    if found != trainer.__version__:
        return warning(f"{value}, but {found} is installed", remedy)
    return ok(value)


def dependencies(machine: Machine) -> Finding:
    """The dependencies of `trainer`, compared with the ranges of its metadata."""
    needed = list(_requirements(None))
    wrong = {requirement: why for requirement in needed if (why := _wrong(requirement))}
    if wrong:
        return problem(
            ", ".join(wrong.values()), "pip install " + " ".join(f'"{one.name}{one.specifier}"' for one in wrong)
        )
    return ok(", ".join(f"{requirement.name} {version(requirement.name)}" for requirement in needed))


def extras(machine: Machine) -> Finding:
    """Packages that some recipes need: DeepSpeed, and the clients of logging targets."""
    present, absent, wrong, needed = [], [], [], False
    targets: Collection[str] = () if machine.recipe is None else machine.recipe.logging.to
    named = (metadata(DISTRIBUTION).get_all("Provides-Extra") or []) if installed(DISTRIBUTION) else []
    for extra in (extra for extra in named if extra not in _FOR_DEVELOPERS):
        requirements = list(_requirements(extra))
        here = [requirement for requirement in requirements if installed(requirement.name)]
        is_needed = extra in targets or (extra == "deepspeed" and machine.needs_deepspeed)
        if not here and not is_needed:
            absent.append(extra)
        elif whys := [why for requirement in requirements if (why := _wrong(requirement))]:
            wrong.append((extra, ", ".join(whys)))
            needed |= is_needed
        else:
            present += [f"{requirement.name} {version(requirement.name)}" for requirement in here]
    if wrong:
        value = "; ".join(why for _, why in wrong)
        remedy = install_command(*(extra for extra, _ in wrong))
        return problem(f"{value}; the recipe needs it", remedy) if needed else warning(value, remedy)
    parts = [", ".join(present), f"not installed: {', '.join(absent)}" if absent else ""]
    return ok("; ".join(filter(None, parts)) or "none")


def deepspeed(machine: Machine) -> Finding:
    """The import of DeepSpeed, which the strategies zero1, zero2 and zero3 need."""
    remedy = install_command("deepspeed")
    if not installed("deepspeed"):
        value = "not installed; zero1, zero2 and zero3 need it"
        return problem(value, remedy) if machine.needs_deepspeed else ok(value)
    try:
        facts = machine.probe.facts(DeepSpeedFacts)
    except ProbeError as error:
        if error.kind is not DeepSpeedFacts:
            raise
        return bad(f"cannot be imported: {error}", f"{remedy}, or use another strategy", machine.needs_deepspeed)
    return ok(facts.version)


def _requirements(extra: str | None) -> Iterator[Requirement]:
    """The requirements of the package itself, or the additional ones of an extra."""
    from packaging.requirements import Requirement

    for requirement in map(Requirement, (requires(DISTRIBUTION) or []) if installed(DISTRIBUTION) else []):
        marker = requirement.marker
        is_always = marker is None or marker.evaluate({"extra": ""})
        if is_always if extra is None else marker is not None and not is_always and marker.evaluate({"extra": extra}):
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
