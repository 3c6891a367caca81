"""The check of DeepSpeed."""

from __future__ import annotations

from trainer.base.distribution import install_command, installed
from trainer.tools.doctor.facts import DeepSpeedFacts
from trainer.tools.doctor.finding import Finding, bad, ok, problem
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
