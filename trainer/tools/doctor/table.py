"""The table of checks, in the order of the output. To add a check, write its function and add its row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trainer.tools.doctor import folders, gpus, network, software, starting, system
from trainer.tools.doctor.asking import KINDS
from trainer.tools.doctor.facts import DeepSpeedFacts, ExerciseFacts, Facts, GlooFacts, GpuFacts, TorchFacts
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
    deep: bool = False  # whether only `--deep` runs it
    asks: type[Facts] | None = None  # the failure of these facts is reported here; other checks refer to it


CHECKS: tuple[Check, ...] = (
    Check("software", "python", software.python),
    Check("software", "trainer", software.trainer_itself),
    Check("software", "dependencies", software.dependencies),
    Check("software", "extras", software.extras),
    Check("software", "torch", gpus.torch_build, _PROBE_SECONDS, asks=TorchFacts),
    Check("gpus", "driver", gpus.driver, _PROBE_SECONDS, asks=GpuFacts),
    Check("gpus", "gpus", gpus.gpus, _PROBE_SECONDS),
    Check("gpus", "free memory", gpus.gpu_memory, _PROBE_SECONDS),
    Check("gpus", "peer access", gpus.peers, _PROBE_SECONDS),
    Check("gpus", "nccl", gpus.nccl, _PROBE_SECONDS),
    Check("gpus", "use", gpus.gpu_use, _PROBE_SECONDS, deep=True, asks=ExerciseFacts),
    Check("deepspeed", "deepspeed", software.deepspeed, _PROBE_SECONDS, asks=DeepSpeedFacts),
    Check("system", "cores", system.cores),
    Check("system", "memory", system.memory),
    Check("system", "shared memory", system.shared_memory),
    Check("system", "open files", system.open_files),
    Check("system", "processes", system.processes),
    Check("system", "locked memory", system.locked_memory),
    Check("network", "interfaces", network.interfaces),
    Check("network", "gloo", network.gloo, _PROBE_SECONDS, asks=GlooFacts),
    Check("network", "nccl interfaces", network.nccl_interfaces, _PROBE_SECONDS),
    Check("network", "infiniband", network.infiniband),
    Check("network", "hub", network.hub),
    Check("folders", "runs", folders.run_folder),
    Check("folders", "checkpoints in memory", folders.checkpoint_memory),
    Check("folders", "data cache", folders.data_cache),
    Check("folders", "hub cache", folders.hub_cache),
    Check("folders", "temporary", folders.temporary),
    Check("starting", "launcher", starting.launcher),
    Check("starting", "accelerate", starting.accelerate_configuration),
    Check("starting", "recipe", starting.recipe, _PROBE_SECONDS),
    Check("starting", "data and model", starting.parts, starting.PARTS_SECONDS + 5),
)
