"""Checks of DeepSpeed, and of the operations that it compiles on first use."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from trainer.base.distribution import install_command, installed
from trainer.engine.deepspeed_package import CPU_OPERATION, build_lock, missing_tools, torch_locks
from trainer.tools.doctor.facts import DeepSpeedFacts
from trainer.tools.doctor.finding import Finding, bad, ok, problem, warning
from trainer.tools.doctor.folders import folder
from trainer.tools.doctor.machine import Machine
from trainer.tools.doctor.probe import ProbeError


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


def operations(machine: Machine) -> Finding:
    """DeepSpeed's operations, prebuilt or compiled on first use. Training on CPUs needs one, on GPUs none."""
    if not installed("deepspeed"):
        return ok("none needed: DeepSpeed is not installed")
    facts = machine.probe.facts(DeepSpeedFacts)
    built = f"built at installation: {', '.join(facts.prebuilt)}" if facts.prebuilt else "none built at installation"
    if machine.gpus:
        return ok(f"none needed on GPUs; {built}")
    if CPU_OPERATION in facts.prebuilt:
        return ok(built)
    missing = missing_tools(machine.environ.get("PATH"))
    if missing:
        return bad(
            f"{built}; {CPU_OPERATION} is compiled on first use, but {' and '.join(missing)} not on the PATH",
            "install g++ (a system package) and ninja (pip install ninja), or use `parallel.strategy` fsdp",
            machine.needs_deepspeed,
        )
    return ok(f"{built}; {CPU_OPERATION} is compiled on first use: g++ and ninja are installed")


def build_folder(machine: Machine) -> Finding:
    """The folder for compiled operations: `TORCH_EXTENSIONS_DIR`, or a folder in the user's cache."""
    if not installed("deepspeed"):
        return ok("none needed: DeepSpeed is not installed")
    facts = machine.probe.facts(DeepSpeedFacts)
    root = Path(facts.build_root)
    with suppress(OSError):  # a folder that cannot be used is reported below
        lock = build_lock(root)
        if lock.is_held():
            return ok(f"{root}: {lock.owner() or 'a process'} compiles {CPU_OPERATION}; runs wait for it")
        for file, process in torch_locks(root):
            if process is not None:
                return ok(f"{root}: process {process} compiles {CPU_OPERATION}; runs wait for it")
            return warning(f"{file} was left by a killed build", f"rm {file}")
    if machine.gpus or CPU_OPERATION in facts.prebuilt:
        return ok(f"{root}: nothing needs to be compiled")
    return folder(root, "set TORCH_EXTENSIONS_DIR to a writable folder", is_needed=machine.needs_deepspeed)
