"""CPU time of the host for a step of each strategy, beside plain loops: the time that a GPU must not wait for.

The model is a BERT with many layers and tiny matrices on gloo ranks, without dropout, so a step is little else than the
calls of Python, torch and DeepSpeed. Counted is the CPU time of all threads of a rank, so that waits for other ranks
and processes do not count. A strategy and its plain loop take turns in the same processes, a few steps each; a ratio is
the median over the rounds, and the milliseconds are the least. From the root of the repository:

    python -m tests.benchmarks.host --layers 12 --rounds 15
    python -m tests.benchmarks.host --profile zero3       # the functions of one contestant
"""

from __future__ import annotations

import argparse
import cProfile
import io
import os
import pstats
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForSequenceClassification

from tests.helpers.ranks import RankPool
from tests.helpers.training import TINY_BERT, tiny_recipe, tiny_training
from trainer.features.deepspeed.package import linear_restored, ready_deepspeed
from trainer.models.families.table import layers_of

ROWS, LENGTH = 4, 12
OURS = ("ddp", "fsdp", "zero1", "zero2", "zero3")
PLAIN = tuple(f"plain {name}" for name in OURS)
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

Step = Callable[[], object]


def config(layers: int) -> dict[str, Any]:
    return {**TINY_BERT, **NO_DROPOUT, "num_hidden_layers": layers}


def plain_model(layers: int) -> nn.Module:
    return BertForSequenceClassification(BertConfig(**config(layers), num_labels=3)).train()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW with weight decay of the matrices alone, as transformers' Trainer has it."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3, foreach=True)


def drawn_rows() -> dict[str, Tensor]:
    ids = torch.randint(5, TINY_BERT["vocab_size"], (ROWS, LENGTH))
    return {"input_ids": ids, "labels": torch.randint(0, 3, (ROWS,))}


@contextmanager
def plain(strategy: str, layers: int, precision: str) -> Iterator[Step]:
    """Yield a step of transformers' model in a loop of torch's own wrappers, with clipping and torch's AdamW."""
    model = plain_model(layers)
    call: Any = model
    if strategy == "plain ddp":
        call = DistributedDataParallel(model)
    else:
        for part in (*layers_of(model).values(), model):
            fully_shard(part)
    optimizer = adamw(model)
    rows = drawn_rows()

    def step() -> float:
        with torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else nullcontext():
            loss = call(**rows).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    yield step


@contextmanager
def plain_deepspeed(strategy: str, layers: int, precision: str) -> Iterator[Step]:
    """Yield a step of the loop that DeepSpeed's pages show, with its defaults, clipping and torch's AdamW."""
    with linear_restored():
        model = plain_model(layers)
        call, *_ = ready_deepspeed(None).initialize(
            model=model,
            optimizer=adamw(model),
            dist_init_required=False,
            config={
                "train_micro_batch_size_per_gpu": ROWS,
                "gradient_clipping": 1.0,
                "zero_optimization": {
                    "stage": int(strategy[-1]),
                    "reduce_bucket_size": 16 * 1024**2,  # by default a buffer of 2 GB, which takes no time of a step
                },
                "torch_autocast": {"enabled": precision == "bf16", "dtype": "bfloat16"},
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
            },
        )
        rows = drawn_rows()

        def step() -> float:
            loss = call(**rows).loss
            call.backward(loss)
            call.step()
            return float(loss.item())

        yield step


@contextmanager
def ours(parallel: dict[str, Any], layers: int, precision: str) -> Iterator[Step]:
    """Yield a step of our engine under a section `parallel`; numbers are read one step late, as in a run."""
    recipe = tiny_recipe(
        model={"config": config(layers), "tokenizer": "none"},
        training={"max_steps": 10_000, "global_batch_size": dist.get_world_size() * ROWS, "micro_batch_size": ROWS},
        precision=precision,
        parallel=parallel,
    )
    with tiny_training(recipe) as training:
        batch = next(iter(training.loader))
        read: list[Callable[[], object]] = []

        def step() -> None:
            read.append(training.engine.begin_step(batch, read.pop if read else lambda: None))
            if len(read) > 1:
                read.pop(0)()

        yield step


def opened(name: str, layers: int, precision: str, deepspeed: dict[str, Any]) -> AbstractContextManager[Step]:
    if name in PLAIN:
        return (plain_deepspeed if "zero" in name else plain)(name, layers, precision)
    keys = {"deepspeed": deepspeed} if deepspeed and name.startswith("zero") else {}
    return ours({"strategy": name, **keys}, layers, precision)


def milliseconds(step: Step, steps: int) -> float:
    start = time.process_time()
    for _ in range(steps):
        step()
    return 1000 * (time.process_time() - start) / steps


def in_turns(
    contestants: Mapping[str, Callable[[], AbstractContextManager[Step]]], rounds: int, steps: int
) -> dict[str, list[float]]:
    """Return this rank's milliseconds of a step of contestants that take turns, one for each round."""
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {name: [] for name in contestants}
    with ExitStack() as stack:
        opened = {name: stack.enter_context(context()) for name, context in contestants.items()}
        for step in opened.values():
            for _ in range(3):
                step()
        for _ in range(rounds):
            for name, step in opened.items():
                dist.barrier()
                found[name].append(milliseconds(step, steps))
    return found


def compete(
    names: Sequence[str], layers: int, precision: str, rounds: int, steps: int, deepspeed: dict[str, Any]
) -> dict[str, list[float]]:
    """Return this rank's milliseconds of a step by contestant, one for each round."""
    found: dict[str, list[float]] = {}
    # One strategy after another: stage 3 replaces torch's linear function, which all others would call.
    for strategy in OURS:
        own = [name for name in names if name.removeprefix("plain ") == strategy]
        found |= in_turns({name: partial(opened, name, layers, precision, deepspeed) for name in own}, rounds, steps)
    return found


def table(found: dict[str, list[float]]) -> Iterator[str]:
    """Yield a row for each strategy: its least milliseconds, those of the plain loop, and the median of the ratios."""
    yield "| | ms | plain loop, ms | ratio |"
    yield "|---|---|---|---|"
    for name in OURS:
        own, other = found.get(name), found.get(f"plain {name}")
        ratio = f"{statistics.median(a / b for a, b in zip(own, other, strict=True)):.2f}" if own and other else ""
        cells = [f"{min(numbers):.1f}" if numbers else "" for numbers in (own, other)]
        if any(cells):
            yield f"| `{name}` | {cells[0]} | {cells[1]} | {ratio} |"


def profile(name: str, layers: int, precision: str, steps: int, most: int, deepspeed: dict[str, Any]) -> str:
    """Return the functions of a contestant with the most time of their own, and those with the most in all."""
    torch.set_num_threads(1)
    text = io.StringIO()
    with opened(name, layers, precision, deepspeed) as step:
        for _ in range(3):
            step()
        profiler = cProfile.Profile(time.process_time)
        profiler.enable()
        for _ in range(steps):
            step()
        profiler.disable()
    stats = pstats.Stats(profiler, stream=text)
    for order in ("tottime", "cumtime"):
        stats.sort_stats(order).print_stats(most)
    return text.getvalue()


def on_ranks(number: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of rank 0; a single rank is this process."""
    if number == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return function(*arguments)
    pool = RankPool(number)
    try:
        return pool.run(function, *arguments, timeout_seconds=3600)[0]
    finally:
        pool.close()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contestants", nargs="+", choices=(*PLAIN, *OURS), default=(*PLAIN, *OURS))
    parser.add_argument("--layers", type=int, default=12, help="layers of the BERT")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=5, help="steps of each contestant in a round")
    parser.add_argument("--profile", choices=(*PLAIN, *OURS), help="profile this contestant alone")
    parser.add_argument("--top", type=int, default=45, help="functions of a profile")
    parser.add_argument("--zero", nargs="*", default=[], metavar="KEY=NUMBER", help="keys of `zero_optimization`")
    options = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"  # before a rank imports torch
    zero = {key: int(value) for key, value in (word.split("=") for word in options.zero)}
    deepspeed = {"zero_optimization": zero} if zero else {}
    if options.profile:
        print(
            on_ranks(
                options.ranks,
                profile,
                options.profile,
                options.layers,
                options.precision,
                options.steps,
                options.top,
                deepspeed,
            )
        )
        return
    names = tuple(options.contestants)
    found = on_ranks(
        options.ranks, compete, names, options.layers, options.precision, options.rounds, options.steps, deepspeed
    )
    print(f"BERT with {options.layers} layers, {options.precision}, {options.ranks} gloo ranks: CPU time for a step\n")
    print("\n".join(table(found)), flush=True)


if __name__ == "__main__":
    main()
