"""The table of checks, in the order of the output. To add a check, write its function and add its row.

A check is here if a newcomer meets its fault before the first run. A recipe is the work of `trainer check`; a cluster,
a missing extra and a limit of the system are named by the run that meets them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trainer.tools.doctor import folders, gpus, network, software
from trainer.tools.doctor.asking import KINDS
from trainer.tools.doctor.facts import Facts, GlooFacts, GpuFacts, TorchFacts
from trainer.tools.doctor.finding import Finding
from trainer.tools.doctor.machine import Machine

_PROBE_SECONDS = sum(kind.limit for kind in KINDS) + 5  # the probe has its own limits, with a better message


@dataclass(frozen=True)
class Check:
    """A row of the table; `--json` contains the names, so they are part of the interface."""

    group: str
    name: str
    examine: Callable[[Machine], Finding]  # function of the check; the documentation shows its docstring
    seconds: float = 10.0
    asks: type[Facts] | None = None  # the failure of these facts is reported here; other checks refer to it


CHECKS: tuple[Check, ...] = (
    Check("software", "trainer", software.trainer_itself),
    Check("software", "dependencies", software.dependencies),
    Check("software", "torch", gpus.torch_build, _PROBE_SECONDS, asks=TorchFacts),
    Check("gpus", "driver", gpus.driver, _PROBE_SECONDS, asks=GpuFacts),
    Check("gpus", "gpus", gpus.gpus, _PROBE_SECONDS),
    Check("gpus", "free memory", gpus.gpu_memory, _PROBE_SECONDS),
    Check("network", "gloo", network.gloo, _PROBE_SECONDS, asks=GlooFacts),
    Check("network", "hub", network.hub),
    Check("folders", "shared memory", folders.shared_memory),
    Check("folders", "runs", folders.run_folder),
    Check("folders", "data cache", folders.data_cache),
)
