"""The table of strategies: what each shards over the data-parallel ranks, and what it combines with.

To add a strategy, add its row here, or register it. The schema, `trainer check`, the start-up summary, the
documentation and the parity tests read this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from trainer.base.extensions import consume, resolved

Offload = Literal["none", "optimizer", "parameters"]


@dataclass(frozen=True)
class Strategy:
    """Placement of parameters, gradients and optimizer state over N data-parallel ranks; not cut means replicated.

    `communication` is the volume that one rank sends in one optimizer step without accumulation, for large N, where P
    is the number of parameters (Rajbhandari et al. 2020, arXiv:1910.02054, section 7). `builder` is the text
    "module:name" of an `EngineBuilder` (`engine/builders.py`), for models without pipeline stages.
    """

    name: str
    summary: str
    communication: str
    builder: str
    cuts_parameters: bool = False
    cuts_gradients: bool = False
    cuts_optimizer: bool = False
    groups: bool = False  # shards within groups of `parallel.shard` ranks, and replicates across groups
    zero_stage: int = 0  # the ZeRO stage of DeepSpeed; 0 for the native engine
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


_DEEPSPEED_OWNS_BACKWARD = (
    "DeepSpeed's engine scales and reduces gradients in its own backward call, but the pipeline schedule runs the"
    " backward passes"
)
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
            "zero1",
            "shards the optimizer state (DeepSpeed)",
            "2P: reduce the gradients, gather the updated parameters",
            "trainer.engine.zero:build_zero",
            cuts_optimizer=True,
            zero_stage=1,
            offloads=("none", "optimizer"),
            no_pipeline=_DEEPSPEED_OWNS_BACKWARD,
        ),
        Strategy(
            "zero2",
            "shards gradients and optimizer state (DeepSpeed)",
            "2P: reduce-scatter the gradients in each microbatch, gather the updated parameters",
            "trainer.engine.zero:build_zero",
            cuts_gradients=True,
            cuts_optimizer=True,
            zero_stage=2,
            offloads=("none", "optimizer"),
            no_pipeline=_DEEPSPEED_OWNS_BACKWARD,
        ),
        Strategy(
            "zero3",
            "shards parameters, gradients and optimizer state; gathers each weight when needed (DeepSpeed)",
            "3P: gather for forward and for backward, reduce-scatter",
            "trainer.engine.zero:build_zero",
            zero_stage=3,
            offloads=("none", "optimizer", "parameters"),
            no_pipeline=_DEEPSPEED_OWNS_BACKWARD,
            no_compile="DeepSpeed gathers each weight by hooks inside of the layers, which no graph can hold",
            no_broadcast="DeepSpeed partitions the weights while each rank reads them",
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
# The first consumer: the schema and the exclusions read the table in theirs.
consume("strategy", lambda row: STRATEGIES.update({row.name: resolved(row.value)}))
