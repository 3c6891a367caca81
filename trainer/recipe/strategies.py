"""The table of strategies: what each shards over the data-parallel ranks, and what it combines with.

To add a strategy, add its row here, or register it. The schema, `trainer check`, the start-up summary, the
documentation and the parity tests read this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trainer.base.extensions import Registration, consume, resolved

Offload = Literal["none", "optimizer", "parameters"]
NO_DP = "is not supported by `parallel.strategy` dp; use ddp, which runs on any number of processes"


@dataclass(frozen=True)
class Strategy:
    """Placement of parameters, gradients and optimizer state over N data-parallel ranks; not cut means replicated.

    `communication` is the volume that one rank sends in one optimizer step without accumulation, for large N, where P
    is the number of parameters (Rajbhandari et al. 2020, arXiv:1910.02054, section 7). `builder` is the text
    "module:name" of an `EngineBuilder` (`engine/builders.py`), for models without pipeline stages.

    An engine of another `package` keeps fp32 copies of the weights in flat buffers, and cuts those. `ready` names a
    function of the number of the rank's GPU that imports the package, on all ranks before they join, and returns the
    context of the training. `configuration` names a function of the plan, which returns the keys of that engine.
    """

    name: str
    summary: str
    communication: str
    builder: str
    cuts_parameters: bool = False
    cuts_gradients: bool = False
    cuts_optimizer: bool = False
    groups: bool = False  # shards within groups of `parallel.shard` ranks, and replicates across groups
    package: str = ""  # of another engine; "" for those of trainer
    ready: str = ""
    configuration: str = ""
    also_called: tuple[str, ...] = ()  # names of other tools
    offloads: tuple[Offload, ...] = ("none",)  # valid values of `parallel.offload`
    single_process: bool = False  # one process drives all GPUs of the machine
    no_tensor: str = ""  # the reason if it does not combine with `parallel.tensor` above 1
    no_pipeline: str = ""  # the reason if it does not combine with `parallel.pipeline.stages` above 1
    no_compile: str = ""  # the reason if it does not combine with `compile`
    no_broadcast: str = ""  # the reason if it does not combine with `parallel.load` broadcast

    def local_ranks(self, num_gpus: int) -> int:
        """Return the default number of ranks that `trainer run` starts on one machine."""
        return 1 if self.single_process else max(1, num_gpus)

    @property
    def cuts_anything(self) -> bool:
        return self.cuts_parameters or self.cuts_gradients or self.cuts_optimizer


_ONE_PROCESS = "the strategy uses one process"
_CUT_ALL: dict[str, Any] = {"cuts_parameters": True, "cuts_gradients": True, "cuts_optimizer": True}

STRATEGIES: dict[str, Strategy] = {
    row.name: row
    for row in (
        Strategy(
            "ddp",
            "every rank holds the whole model (DistributedDataParallel)",
            "2P: one all-reduce of the gradients",
            "trainer.engine.ddp:build_ddp",
        ),
        Strategy(
            "fsdp",
            "shards parameters, gradients and optimizer state; gathers each layer when needed (fully_shard)",
            "3P: gather for forward and for backward, reduce-scatter; 2P with `reshard_after_forward` false",
            "trainer.engine.sharded:build_sharded",
            offloads=("none", "parameters"),
            **_CUT_ALL,
        ),
        Strategy(
            "hsdp",
            "as fsdp within groups of `shard` ranks; the groups are replicas",
            "3P within a group, and 2P/`shard` across groups",
            "trainer.engine.sharded:build_sharded",
            groups=True,
            offloads=("none", "parameters"),
            **_CUT_ALL,
        ),
        Strategy(
            "dp",
            "one process with a replica of the model on every GPU of the machine (DataParallel)",
            "2P a step from and to the first GPU, which limits the speed",
            "trainer.engine.replicated:build_replicated",
            single_process=True,
            no_tensor=_ONE_PROCESS,
            no_pipeline=_ONE_PROCESS,
            no_compile="its threads would trace the same layers at the same time",
            no_broadcast=_ONE_PROCESS,
        ),
    )
}


def _add(registration: Registration) -> None:
    """Add a row: an object, or its keys in an `extension.json`, which no import can make a circle of."""
    row: Strategy | Mapping[str, Any] = resolved(registration.value)
    if not isinstance(row, Strategy):
        keys: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
        row = Strategy(registration.name, **keys)
    STRATEGIES[row.name] = row


# The first consumer: the schema and the exclusions read the table in theirs.
consume("strategy", _add)
