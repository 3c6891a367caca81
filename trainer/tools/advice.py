"""Plans of a run's memory: a note before the first step, and advice when a device is full.

Plans are made by child processes, because a rank cannot simulate another one.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from trainer.base.errors import OutOfMemoryError
from trainer.base.processes import child_variables
from trainer.base.text import size
from trainer.ranks.environment import LaunchEnvironment, without_ranks

if TYPE_CHECKING:
    from trainer.recipe.reading.loading import ResolvedRecipe

_ADVICE_SECONDS = 60.0
_WAIT_SECONDS = 2.0


class NoPlanError(Exception):
    """A planning process made no plan; the text is the reason."""


class PlannedMemory:
    """A planning process of a run on GPUs, and the note on its result."""

    def __init__(self, resolved: ResolvedRecipe, environment: LaunchEnvironment) -> None:
        self._environment = environment
        self._child: subprocess.Popen[str] | None = None
        # The size of the memory is not known here: a look at it would start CUDA before data workers fork.
        self._command = _plan_command(resolved, environment, "1GiB")
        with suppress(OSError):
            self._child = start_plan(self._command, "--json", "--changes", "0")

    def stop(self) -> None:
        if self._child is not None:
            _stop(self._child)

    def notes(self) -> list[str]:
        if self._child is None:
            return []
        memory = int(_gibibytes(self._environment) * 2**30)
        at = self._command.index("--gpus") + 1
        gpus = f"{self._environment.local_world_size}x{memory / 2**30:.1f}GiB"
        command = shlex.join([*self._command[:at], gpus, *self._command[at + 1 :]])
        try:
            needed = result_of(self._child, _WAIT_SECONDS)["needed_bytes"]
        except NoPlanError as error:
            return [f"memory was not planned: {error}; this command plans it: {command}"]
        finally:
            _stop(self._child)
        if needed <= memory:
            return [f"planned memory: {size(needed)} of {size(memory)} on each GPU"]
        return [
            f"planned memory: {size(needed)}, but each GPU has {size(memory)}; this shows changes that fit: {command}"
        ]


def explained(error: RuntimeError, resolved: ResolvedRecipe, environment: LaunchEnvironment) -> OutOfMemoryError:
    """Return the error of a full device, with the command that plans changes."""
    reason = str(error).splitlines()[0].rpartition("DefaultCPUAllocator: ")[2]
    command = _plan_command(resolved, environment)
    return OutOfMemoryError(
        f"rank {environment.rank}: the memory of {_device(environment)} is full ({reason}); half of"
        " `training.micro_batch_size` gives the same training with less memory, and this command shows the peak and"
        f" changes that fit: {shlex.join(command)}",
        command,
    )


def advice(command: Sequence[str]) -> str | None:
    """Return the peak of a run and changes that fit, from its planning command; None if it fails or takes a minute."""
    try:
        child = start_plan(command, "--json")
    except OSError:  # no memory for a process
        return None
    try:
        made = result_of(child, _ADVICE_SECONDS)
    except NoPlanError:
        return None
    finally:
        _stop(child)
    rank = max(made["ranks"], key=lambda rank: rank["peak_bytes"])
    component, held = max(rank["peak"].items(), key=lambda item: item[1])
    module = f" in {rank['peak_module']}" if rank["peak_module"] else ""
    lines = [
        f"planned peak: {size(rank['peak_bytes'])}{module}, mostly {component} ({size(held)}); with its allowance for"
        f" the device, the plan needs {size(made['needed_bytes'])} of {size(made['memory_bytes'])}"
    ]
    if made["fits"]:
        lines.append("so the plan fits; other programs may hold memory of the device")
    elif made["changes"]:
        lines.append("these changes fit:")
        lines += [f"  {' '.join(change['overrides'])}  ({size(change['needed_bytes'])})" for change in made["changes"]]
    else:
        lines.append("no change that was tried fits; use more devices")
    return "\n".join(lines)


def start_plan(command: Sequence[str], *options: str) -> subprocess.Popen[str]:
    """Start a planning command that leaves the GPUs alone."""
    return subprocess.Popen(
        [sys.executable, "-m", *command, *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=without_ranks(child_variables()),
    )


def _stop(child: subprocess.Popen[str]) -> None:
    child.kill()
    # It reads the rest of the pipes and waits, so that no process of the plan stays behind.
    child.communicate()


def result_of(child: subprocess.Popen[str], seconds: float) -> Mapping[str, Any]:
    """Return the plan of a planning command, for which it waits so many seconds.

    Raises:
        NoPlanError: it failed, or is not ready.
    """
    try:
        text, errors = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise NoPlanError("the plan was not ready in time") from None
    if child.returncode:
        reason = (errors.strip().splitlines() or ["no message"])[-1]
        raise NoPlanError(f"the plan failed with exit code {child.returncode} ({reason})")
    try:
        made: Mapping[str, Any] = json.loads(text)
    except ValueError:  # a package may print, too
        raise NoPlanError(f"the plan is no JSON ({text[:40]!r})") from None
    return made


def _device(environment: LaunchEnvironment) -> str:
    if torch.cuda.is_available():
        place = f"GPU {torch.cuda.current_device()}, {torch.cuda.get_device_name()}"
        return f"{place} with {_gibibytes(environment):.1f} GiB,"
    return f"this machine, {_gibibytes(environment):.1f} GiB for each of its ranks,"


def _gibibytes(environment: LaunchEnvironment) -> float:
    """Return the memory of this rank's device; ranks on CPUs share that of the machine."""
    if torch.cuda.is_available():
        return float(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory) / 2**30
    from trainer.base.cgroup import machine_memory_bytes

    return float(machine_memory_bytes()) / environment.local_world_size / 2**30


def _plan_command(resolved: ResolvedRecipe, environment: LaunchEnvironment, memory: str | None = None) -> list[str]:
    words = [
        f"{key}={json.dumps(resolved.values[key])}"
        for key, origin in resolved.origins.items()
        if origin.source == "command line" and key in resolved.values
    ]
    local, nodes = environment.local_world_size, environment.world_size // environment.local_world_size
    gpus = f"{local}x{memory or f'{_gibibytes(environment):.1f}GiB'}"
    more = ["--nodes", str(nodes)] if nodes > 1 else []
    return ["trainer", "plan", str(resolved.file), "--gpus", gpus, *more, *words]
