"""Makes the checks, all at once, each within its time; one that fails or hangs is a line like any other."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from trainer.doctor.facts import ExerciseFacts, Facts, GpuFacts, TorchFacts
from trainer.doctor.finding import Finding, Result, problem, warning
from trainer.doctor.machine import Machine
from trainer.doctor.probe import ProbeError, ProcessProbe
from trainer.doctor.table import CHECKS, Check

if TYPE_CHECKING:
    from trainer.recipe.schema import Recipe

_REMEDIES: Mapping[type[Facts], str] = {
    TorchFacts: "see to what the message names; for a library or a symbol, install torch again",
    GpuFacts: "see nvidia-smi and `dmesg | grep -i xid`; restart the driver or the machine",
    ExerciseFacts: "see `dmesg | grep -i xid`; run it again with NCCL_DEBUG=INFO, and with NCCL_P2P_DISABLE=1",
}
"""What to do where the probe found nothing out, by what it was asked."""


def examine_this_machine(recipe: Recipe | None, processes: int | None, deep: bool) -> list[Result]:
    """What all checks find here; see `Machine` and `examine`."""
    probe = ProcessProbe(deep)
    try:
        return examine(Machine(os.environ, probe, recipe=recipe, processes=processes), deep)
    finally:
        probe.close()


def examine(machine: Machine, deep: bool = False, checks: Sequence[Check] = CHECKS) -> list[Result]:
    """What the checks find, in their order.

    Args:
        machine: to look at.
        deep: whether those are made, too, that use the GPUs.
        checks: to make.
    """
    begun = [_Making(check, machine) for check in checks if deep or not check.deep]
    return [making.result() for making in begun]


class _Making:
    """A check in a thread of its own, which is left behind where it hangs."""

    def __init__(self, check: Check, machine: Machine) -> None:
        self._check = check
        self._machine = machine
        self._finding: Finding | None = None
        self._end = time.monotonic() + check.seconds
        self._thread = threading.Thread(target=self._make, daemon=True)
        self._thread.start()

    def result(self) -> Result:
        self._thread.join(max(0.0, self._end - time.monotonic()))
        finding = self._finding or problem(
            f"no answer within {self._check.seconds:.0f} s",
            "something that it asks the system for hangs: a network drive, a name server, a driver",
        )
        return Result(self._check.name, self._check.group, finding.status, finding.value, finding.remedy)

    def _without_facts(self, error: ProbeError) -> Finding:
        """One cause is one problem: the check whose question it was has it, the others name that one."""
        if self._check.asks is error.kind:
            return problem(str(error), _REMEDIES[error.kind])
        first = next((check.name for check in CHECKS if check.asks is error.kind), self._check.name)
        return warning("not looked at", f"see to the line of {first} first")

    def _make(self) -> None:
        try:
            self._finding = self._check.examine(self._machine)
        except ProbeError as error:
            self._finding = self._without_facts(error)
        except ImportError as error:
            self._finding = problem(f"not looked at: {error}", "see to the line of dependencies first")
        except Exception as error:
            self._finding = problem(
                f"the check itself failed: {type(error).__name__}: {error}", "this is a fault of trainer: report it"
            )
