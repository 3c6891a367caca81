"""The table of strategies: one row says what a strategy cuts over the data-parallel ranks and what it combines with.

To add a strategy, add its row here and its builder in `engine/building.py`; the schema, `trainer check`, the start-up
summary, the documentation and the parity tests read this table, so a new row is validated, shown and tested at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Offload = Literal["none", "optimizer", "parameters"]


@dataclass(frozen=True)
class Strategy:
    """How parameters, gradients and optimizer state lie over N data-parallel ranks; what is not cut is held whole.

    `communication` is what one rank sends in one optimizer step without accumulation, in units of the model's P
    parameters, for large N (Rajbhandari et al. 2020, arXiv:1910.02054, section 7).
    """

    name: str
    summary: str
    communication: str
    cuts_parameters: bool = False
    cuts_gradients: bool = False
    cuts_optimizer: bool = False
    groups: bool = False  # cut within groups of `parallel.shard` ranks only, and replicated across them
    zero_stage: int = 0  # of DeepSpeed, whose engine runs it; 0: our native engine does
    offloads: tuple[Offload, ...] = ("none",)  # what `parallel.offload` may say
    single_process: bool = False  # one process drives all GPUs of the machine
    no_tensor: str = ""  # why it does not combine with `parallel.tensor` above 1
    no_pipeline: str = ""  # why it does not combine with `parallel.pipeline.stages` above 1

    @property
    def tensor(self) -> bool:
        """Whether it combines with `parallel.tensor` above 1."""
        return not self.no_tensor

    @property
    def pipeline(self) -> bool:
        """Whether it combines with `parallel.pipeline.stages` above 1."""
        return not self.no_pipeline

    def local_ranks(self, num_gpus: int) -> int:
        """Ranks that `trainer run` starts on a machine by itself: one for each GPU, or one."""
        return 1 if self.single_process else max(1, num_gpus)

    @property
    def cuts_anything(self) -> bool:
        return self.cuts_parameters or self.cuts_gradients or self.cuts_optimizer


_DEEPSPEED_OWNS_BACKWARD = (
    "DeepSpeed's engine scales, reduces and counts in a backward pass of its own, but with a pipeline its schedule"
    " runs the backward passes"
)
_ONE_PROCESS = "it is one process"
_CUT_ALL: dict[str, Any] = {"cuts_parameters": True, "cuts_gradients": True, "cuts_optimizer": True}

STRATEGIES: dict[str, Strategy] = {
    row.name: row
    for row in (
        Strategy(
            "ddp",
            "every rank holds the whole model (DistributedDataParallel)",
            "2P: one all-reduce of the gradients",
        ),
        Strategy(
            "fsdp",
            "every rank holds 1/N of everything and gathers each layer when it is needed (fully_shard)",
            "3P: gather for forward and for backward, reduce-scatter; 2P with `reshard_after_forward` false",
            offloads=("none", "parameters"),
            **_CUT_ALL,
        ),
        Strategy(
            "hsdp",
            "as fsdp within groups of `shard` ranks, which are copies of each other",
            "3P within a group, and 2P/`shard` across groups",
            groups=True,
            offloads=("none", "parameters"),
            **_CUT_ALL,
        ),
        Strategy(
            "zero1",
            "every rank holds 1/N of the optimizer state (DeepSpeed)",
            "2P: reduce the gradients, gather the updated parameters",
            cuts_optimizer=True,
            zero_stage=1,
            offloads=("none", "optimizer"),
            no_pipeline=_DEEPSPEED_OWNS_BACKWARD,
        ),
        Strategy(
            "zero2",
            "every rank holds 1/N of gradients and optimizer state (DeepSpeed)",
            "2P: reduce-scatter the gradients in each microbatch, gather the updated parameters",
            cuts_gradients=True,
            cuts_optimizer=True,
            zero_stage=2,
            offloads=("none", "optimizer"),
            no_pipeline=_DEEPSPEED_OWNS_BACKWARD,
        ),
        Strategy(
            "zero3",
            "every rank holds 1/N of everything and gathers each weight when it is needed (DeepSpeed)",
            "3P: gather for forward and for backward, reduce-scatter",
            zero_stage=3,
            offloads=("none", "optimizer", "parameters"),
            no_pipeline=_DEEPSPEED_OWNS_BACKWARD,
            **_CUT_ALL,
        ),
        Strategy(
            "dp",
            "one process, a copy of the model on every GPU of the machine (DataParallel)",
            "2P a step from and to the first GPU, which is the bottleneck",
            single_process=True,
            no_tensor=_ONE_PROCESS,
            no_pipeline=_ONE_PROCESS,
        ),
    )
}
STRATEGY_NAMES = tuple(STRATEGIES)
