"""Run all checks at once, each with a time limit; a check that fails or hangs gives a line too."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future

from trainer.tools.doctor.finding import Finding, Result, problem, warning
from trainer.tools.doctor.machine import Machine
from trainer.tools.doctor.probe import Probe, ProbeError
from trainer.tools.doctor.table import CHECKS, Check


def examine_this_machine() -> list[Result]:
    """Run all checks on this machine; see `Machine` and `examine`."""
    probe = Probe()
    try:
        return examine(Machine(os.environ, probe))
    finally:
        probe.close()


def examine(machine: Machine, checks: Sequence[Check] = CHECKS) -> list[Result]:
    """Run the checks and return their results in order."""
    begun = [(check, time.monotonic(), _begin(check, machine)) for check in checks]
    return [_result(*one) for one in begun]


def _begin(check: Check, machine: Machine) -> Future[Finding]:
    """Make a check in a thread of its own, which is abandoned if it hangs."""
    finding: Future[Finding] = Future()
    threading.Thread(target=lambda: finding.set_result(_finding(check, machine)), daemon=True).start()
    return finding


def _result(check: Check, begun: float, finding: Future[Finding]) -> Result:
    try:
        found = finding.result(max(0.0, begun + check.seconds - time.monotonic()))
    except TimeoutError:
        found = problem(
            f"no answer within {check.seconds:.0f} s",
            "a network drive, a name server or a driver hangs: check the system log",
        )
    return Result(check.name, check.group, found.status, found.value, found.remedy)


def _finding(check: Check, machine: Machine) -> Finding:
    try:
        return check.examine(machine)
    except ProbeError as error:
        # One cause is reported once: the check that asked has the problem, and the others refer to it.
        if check.asks is error.kind:
            return problem(str(error), error.kind.remedy)
        first = next((other.name for other in CHECKS if other.asks is error.kind), check.name)
        return warning("not checked", f"fix the check `{first}` first")
    except ImportError as error:
        return problem(f"not checked: {error}", "fix the check `dependencies` first")
    except Exception as error:
        return problem(
            f"the check itself failed: {type(error).__name__}: {error}", "this is a bug of trainer: report it"
        )
