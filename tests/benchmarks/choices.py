"""Messages, memory and host time of a step under each choice of a strategy, such as the sizes of its buckets.

Messages, their bytes and memory are counted in plans of a BERT-base in bf16 on 8 GPUs, 8 rows of 128 tokens each. A
plan runs the engine itself, and a test compares plans with real ranks. Host times are those of `tests.benchmarks.host`,
for 2 gloo ranks and a BERT with a thousandth of the parameters: numbers of elements are divided by 1,000 there. The
choices of a strategy take turns in the same processes; a ratio to the first choice is the median over the rounds.
Neither shows whether a GPU computes beside a message. From the root of the repository:

    python -m tests.benchmarks.choices
    python -m tests.benchmarks.choices --strategies zero3 --rounds 0    # without host times
"""

from __future__ import annotations

import argparse
import inspect
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from tests.benchmarks import host
from tests.helpers.training import tiny_recipe
from trainer.engine import ddp
from trainer.recipe.plan import plan_run
from trainer.tools.plan import simulated_rank, simulated_step
from trainer.tools.plan.ledger import Ledger
from trainer.tools.plan.simulated_rank import replaced

BERT_BASE = {
    "model_type": "bert",
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
}
RANKS, ROWS, LENGTH = 8, 8, 128
MI = 1024**2
SHARE = 1000  # the parameters of the counted model for each of the timed one
_ELEMENTS = {
    "reduce_bucket_size": 16 * MI,
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
}
"""The numbers of elements that a run has, unless a choice changes them."""

Patch = Callable[[float], AbstractContextManager[Any]]
"""A function that opens a context with a choice that no key of a recipe sets, for a share of the counted model."""


@dataclass(frozen=True)
class Choice:
    strategy: str
    label: str
    keys: Mapping[str, Any] = field(default_factory=dict)  # of `parallel`
    zero: Mapping[str, Any] = field(default_factory=dict)  # of DeepSpeed's `zero_optimization`
    patch: Patch = lambda _: nullcontext()

    def parallel(self, share: int = 1) -> dict[str, Any]:
        """Return the section `parallel` of a recipe, with numbers of elements divided by `share`."""
        found = {"strategy": self.strategy, **self.keys}
        if not self.strategy.startswith("zero"):
            return found
        elements = {key: number // share for key, number in {**_ELEMENTS, **self.zero}.items() if key in _ELEMENTS}
        zero = {**self.zero, **elements} if share > 1 else dict(self.zero)
        return {**found, "deepspeed": {"zero_optimization": zero}}


def _buckets(mebibytes: int) -> Patch:
    def patch(share: float) -> AbstractContextManager[Any]:
        size = mebibytes / share
        sized: Any = type("Sized", (DistributedDataParallel,), {"__init__": _sized(size)})
        sized.__signature__ = inspect.signature(DistributedDataParallel)
        stack = ExitStack()
        stack.enter_context(replaced(simulated_rank, BUCKET_BYTES=int(size * MI)))
        stack.enter_context(replaced(ddp, DistributedDataParallel=sized))
        return stack

    return patch


def _sized(mebibytes: float) -> Any:
    def build(wrapped: Any, *arguments: Any, **options: Any) -> None:
        DistributedDataParallel.__init__(wrapped, *arguments, bucket_cap_mb=mebibytes, **options)

    return build


def _no_prefetch(_: float) -> AbstractContextManager[Any]:
    return replaced(FSDPModule, set_modules_to_forward_prefetch=lambda *_: None)


def _zero(strategy: str, *changes: Mapping[str, Any]) -> list[Choice]:
    named = [(", ".join(f"`{key}` {_shown(value)}" for key, value in zero.items()), zero) for zero in changes]
    return [Choice(strategy, "ours"), *(Choice(strategy, label, zero=zero) for label, zero in named)]


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value // MI} Mi" if value and value % MI == 0 else f"{value:,}"


_OVERLAP, _REDUCES = {"overlap_comm": True}, {"use_multi_rank_bucket_allreduce": False}
_BUCKETS = [{"reduce_bucket_size": 4 * MI}, {"reduce_bucket_size": 500_000_000}]
CHOICES = [
    Choice("ddp", "ours: buckets of 25 MiB", patch=_buckets(25)),
    *(Choice("ddp", f"buckets of {size} MiB", patch=_buckets(size)) for size in (5, 100, 1000)),
    Choice("fsdp", "ours"),
    Choice("fsdp", "no prefetch in the forward pass", patch=_no_prefetch),
    Choice("fsdp", "`reshard_after_forward` false", {"reshard_after_forward": False}),
    *_zero("zero1", _OVERLAP, _REDUCES),
    *_zero("zero2", _OVERLAP, _REDUCES, *_BUCKETS),
    *_zero(
        "zero3",
        _OVERLAP,
        {"stage3_param_persistence_threshold": 100_000},
        {"stage3_prefetch_bucket_size": 0},
        {"stage3_prefetch_bucket_size": 5_000_000},
        {"stage3_max_live_parameters": 30_000_000, "stage3_max_reuse_distance": 0},
    ),
]


@dataclass(frozen=True)
class Counted:
    messages: int
    sent: int  # the bytes that a rank sends in them, by a ring
    largest: int  # the bytes of the largest tensor of a message, whole
    peak: int  # the bytes alive at the peak of the step


class _Recording(Ledger):
    """A ledger with each message of the last step."""

    messages: list[tuple[str, int]] = []  # noqa: RUF012 - the ledger of a plan is made inside of it

    def restart(self) -> None:
        super().restart()
        self.messages.clear()

    def _count_collective(self, function: Any, args: Any, inputs: list[Tensor]) -> None:
        super()._count_collective(function, args, inputs)
        self.messages.append((function._overloadpacket.__name__, max(tensor.nbytes for tensor in inputs)))


def counted(
    choice: Choice, config: Mapping[str, Any] = BERT_BASE, ranks: int = RANKS, length: int = LENGTH, share: int = 1
) -> Counted:
    """Return the numbers of a step of the first rank, with numbers of elements divided by `share`."""
    recipe = tiny_recipe(
        model={"config": dict(config), "tokenizer": "none"},
        training={"max_steps": 10, "global_batch_size": ranks * ROWS, "micro_batch_size": ROWS},
        precision="bf16",
        parallel=choice.parallel(share),
    )
    # All layers run: the buckets of DDP are not linear in their number.
    whole = replaced(simulated_step, Ledger=_Recording, stacks_of=lambda *_: [])
    with whole, choice.patch(share):
        step = simulated_step.plan_step(plan_run(recipe, ranks), 0, length)
    messages = _Recording.messages
    rounds = [(2 if "allreduce" in name else 1) * size for name, size in messages]
    sent = sum(rounds) * (ranks - 1) // ranks
    return Counted(len(messages), sent, max(size for _, size in messages), step.peak.num_bytes)


def timed(names: Sequence[str], layers: int, rounds: int, steps: int) -> dict[str, list[float]]:
    """Return this rank's milliseconds of a step by the label of a choice, one for each round; see `host`."""
    found: dict[str, list[float]] = {}
    for strategy in names:
        own = [choice for choice in CHOICES if choice.strategy == strategy]
        opened = {f"{strategy}, {choice.label}": partial(_opened, choice, layers) for choice in own}
        found |= host.in_turns(opened, rounds, steps)
    return found


@contextmanager
def _opened(choice: Choice, layers: int) -> Iterator[host.Step]:
    with ExitStack() as stack:
        with choice.patch(SHARE):  # while the engine is built
            step = stack.enter_context(host.ours(choice.parallel(SHARE), layers, "bf16"))
        yield step


def rows(strategies: Sequence[str], times: Mapping[str, Sequence[float]]) -> Iterator[str]:
    """Yield the rows of the table of choices."""
    yield "| | messages | sent, MB | largest, MB | peak, MB | host, ms | ratio |"
    yield "|---|---|---|---|---|---|---|"
    for strategy in strategies:
        own = [choice for choice in CHOICES if choice.strategy == strategy]
        base = times.get(f"{strategy}, {own[0].label}", ())
        for choice in own:
            found, mine = counted(choice), times.get(f"{strategy}, {choice.label}", ())
            ratio = statistics.median(a / b for a, b in zip(mine, base, strict=True)) if mine else None
            cells = [
                str(found.messages),
                *(f"{number / 1e6:,.0f}" for number in (found.sent, found.largest, found.peak)),
                *((f"{min(mine):.1f}", f"{ratio:.2f}") if ratio else ("", "")),
            ]
            yield f"| `{strategy}`, {choice.label} | {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategies", nargs="+", choices=host.OURS, default=host.OURS)
    parser.add_argument("--layers", type=int, default=12, help="layers of the BERT with host times")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of host times; 0: none")
    parser.add_argument("--steps", type=int, default=3, help="steps of each choice in a round")
    options = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"  # before a rank imports torch
    strategies = tuple(options.strategies)
    times: dict[str, list[float]] = {}
    if options.rounds:
        times = host.on_ranks(2, timed, strategies, options.layers, options.rounds, options.steps)
    for row in rows(strategies, times):
        print(row, flush=True)


if __name__ == "__main__":
    main()
