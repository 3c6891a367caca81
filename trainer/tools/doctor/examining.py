"""Run all checks at once, each with a time limit; a check that fails or hangs gives a line too."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainer.tools.doctor.finding import Finding, Result, problem, warning
from trainer.tools.doctor.machine import Machine
from trainer.tools.doctor.probe import Probe, ProbeError
from trainer.tools.doctor.table import CHECKS, Check

if TYPE_CHECKING:
    from trainer.recipe.schema import Recipe


def examine_this_machine(recipe: Recipe | None, processes: int | None, deep: bool) -> list[Result]:
    """Run all checks on this machine; see `Machine` and `examine`."""
    probe = Probe(deep)
    try:
        return examine(Machine(os.environ, probe, recipe=recipe, processes=processes), deep)
    finally:
        probe.close()


def examine(machine: Machine, deep: bool = False, checks: Sequence[Check] = CHECKS) -> list[Result]:
    """Run the checks and return their results in order.

    Args:
        deep: whether to run the checks that use the GPUs.
    """
    begun = [_Making(check, machine) for check in checks if deep or not check.deep]
    return [making.result() for making in begun]


class _Making:
    """A check in its own thread, which is abandoned if it hangs."""

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
            "a network drive, a name server or a driver hangs: check the system log",
        )
        return Result(self._check.name, self._check.group, finding.status, finding.value, finding.remedy)

    def _without_facts(self, error: ProbeError) -> Finding:
        """Report one cause once: the check that asked has the problem, and the others refer to it."""
        if self._check.asks is error.kind:
            return problem(str(error), error.kind.remedy)
        first = next((check.name for check in CHECKS if check.asks is error.kind), self._check.name)
        return warning("not checked", f"fix the check `{first}` first")

    def _make(self) -> None:
        try:
            self._finding = self._check.examine(self._machine)
        except ProbeError as error:
            self._finding = self._without_facts(error)
        except ImportError as error:
            self._finding = problem(f"not checked: {error}", "fix the check `dependencies` first")
        except Exception as error:
            self._finding = problem(
                f"the check itself failed: {type(error).__name__}: {error}", "this is a bug of trainer: report it"
            )
