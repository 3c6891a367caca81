"""Checks of DeepSpeed, and of what it compiles on first use."""

from __future__ import annotations

import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from trainer.doctor.facts import DeepSpeedFacts, GpuFacts, TorchFacts
from trainer.doctor.finding import Finding, ok, problem, warning
from trainer.doctor.folders import folder
from trainer.doctor.machine import Machine
from trainer.doctor.probe import ProbeError
from trainer.engine.compiling import CPU_OPERATION, abandoned_locks, missing_tools

_NOT_INSTALLED = "not installed"


def deepspeed(machine: Machine) -> Finding:
    """DeepSpeed, which the strategies zero1, zero2 and zero3 need, imported.

    Warning, or a problem where the recipe needs it: it is not to be imported. Install it again: `pip install
    "trainer[deepspeed]"`.
    """
    remedy = 'pip install "trainer[deepspeed]"'
    if not _is_installed():
        value = f"{_NOT_INSTALLED}; zero1, zero2 and zero3 need it"
        return problem(value, remedy) if machine.needs_deepspeed else ok(value)
    try:
        facts = machine.probe.facts(DeepSpeedFacts)
    except ProbeError as error:
        if error.kind is not DeepSpeedFacts:
            raise
        return _bad(machine, f"cannot be imported: {error}", f"{remedy}; until then, zero1, zero2 and zero3 do not run")
    return ok(facts.version)


def operations(machine: Machine) -> Finding:
    """The operations of DeepSpeed: built when it was installed, or compiled on first use.

    On GPUs the trainer needs none. On CPUs it needs one.

    Warning, or a problem where the recipe needs it: it is to be compiled, but g++ or ninja is missing. Install
    them.
    """
    if not _is_installed():
        return ok("none needed: DeepSpeed is not installed")
    facts = machine.probe.facts(DeepSpeedFacts)
    built = f"built at installation: {', '.join(facts.prebuilt)}" if facts.prebuilt else "none built at installation"
    if _uses_gpus(machine):
        nvcc = "" if shutil.which("nvcc", path=machine.environ.get("PATH")) else "; no nvcc to compile others"
        return ok(f"none needed on GPUs; {built}{nvcc}")
    if CPU_OPERATION in facts.prebuilt:
        return ok(built)
    missing = missing_tools(machine.environ.get("PATH"))
    if missing:
        return _bad(
            machine,
            f"{built}; {CPU_OPERATION} is compiled on first use, but {' and '.join(missing)} not on the PATH",
            "install g++ (a package of the system) and ninja (pip install ninja), or use `parallel.strategy` fsdp",
        )
    return ok(f"{built}; {CPU_OPERATION} is compiled on first use: g++ and ninja are there")


def build_folder(machine: Machine) -> Finding:
    """Where operations are compiled: `TORCH_EXTENSIONS_DIR`, or a folder in the user's cache.

    Warning, or a problem where the recipe needs it: it cannot be written, or holds the lock of a build that was
    killed, for which torch would wait without end. Set `TORCH_EXTENSIONS_DIR`; delete the lock.
    """
    if not _is_installed():
        return ok("none needed: DeepSpeed is not installed")
    root = Path(machine.probe.facts(DeepSpeedFacts).build_root)
    for lock, minutes in abandoned_locks(root):
        return _bad(machine, f"{lock} is {minutes:.0f} minutes old: the build that held it was killed", f"rm {lock}")
    if _uses_gpus(machine) or CPU_OPERATION in machine.probe.facts(DeepSpeedFacts).prebuilt:
        return ok(f"{root}: nothing needs to be compiled")
    return folder(root, "set TORCH_EXTENSIONS_DIR to a folder that can be written", is_needed=machine.needs_deepspeed)


def _is_installed() -> bool:
    try:
        version("deepspeed")
    except PackageNotFoundError:
        return False
    return True


def _uses_gpus(machine: Machine) -> bool:
    return not machine.probe.facts(TorchFacts).is_cpu_build and bool(machine.probe.facts(GpuFacts).gpus)


def _bad(machine: Machine, value: str, remedy: str) -> Finding:
    return problem(value, remedy) if machine.needs_deepspeed else warning(value, remedy)
