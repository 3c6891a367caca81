"""CPU time of the host for a step of each strategy, beside plain loops: the time that a GPU must not wait for.

The model is a BERT with many layers and tiny matrices on gloo ranks, without dropout, so a step is little else than the
calls of Python, torch and DeepSpeed. Counted is the CPU time of the rank's main thread and of autograd's, so that waits
for other ranks and processes do not count. Contestants take turns in the same processes; the numbers are medians over
rounds. From the root of the repository:

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForSequenceClassification

from tests.helpers.ranks import RankPool
from tests.helpers.training import TINY_BERT, tiny_recipe, tiny_training
from trainer.models.families.table import layers_of

ROWS, LENGTH = 4, 12
PLAIN = ("plain ddp", "plain fsdp")
OURS = ("ddp", "fsdp", "zero1", "zero2", "zero3")
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

Step = Callable[[], object]


def config(layers: int) -> dict[str, Any]:
    return {**TINY_BERT, **NO_DROPOUT, "num_hidden_layers": layers}


@contextmanager
def plain(strategy: str, layers: int, precision: str) -> Iterator[Step]:
    """Yield a step of transformers' model in a loop of torch's own wrappers, with clipping and torch's AdamW."""
    model = BertForSequenceClassification(BertConfig(**config(layers), num_labels=3)).train()
    call: Any = model
    if strategy == "plain ddp":
        call = DistributedDataParallel(model)
    else:
        for part in (*layers_of(model).values(), model):
            fully_shard(part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    ids = torch.randint(5, TINY_BERT["vocab_size"], (ROWS, LENGTH))
    labels = torch.randint(0, 3, (ROWS,))

    def step() -> float:
        with torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else nullcontext():
            loss = call(input_ids=ids, labels=labels).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    yield step


@contextmanager
def ours(strategy: str, layers: int, precision: str, deepspeed: dict[str, Any]) -> Iterator[Step]:
    """Yield a step of our engine; numbers are read one step late, as in a run."""
    parallel = {"strategy": strategy} | ({"deepspeed": deepspeed} if deepspeed and strategy.startswith("zero") else {})
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


def opened(name: str, layers: int, precision: str, deepspeed: dict[str, Any]) -> Any:
    return plain(name, layers, precision) if name in PLAIN else ours(name, layers, precision, deepspeed)


def milliseconds(step: Step, steps: int) -> float:
    start = time.process_time()
    for _ in range(steps):
        step()
    return 1000 * (time.process_time() - start) / steps


def compete(
    names: Sequence[str], layers: int, precision: str, rounds: int, steps: int, deepspeed: dict[str, Any]
) -> dict[str, list[float]]:
    """Return this rank's milliseconds of a step by contestant, one for each round."""
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {name: [] for name in names}
    for name in names:  # one after another, because DeepSpeed keeps its state in modules
        with opened(name, layers, precision, deepspeed) as step:
            for _ in range(3):
                step()
            for _ in range(rounds):
                dist.barrier()
                found[name].append(milliseconds(step, steps))
    return found


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
    print("| | ms | least | most |\n|---|---|---|---|")
    for name, numbers in found.items():
        print(f"| {name} | {statistics.median(numbers):.1f} | {min(numbers):.1f} | {max(numbers):.1f} |", flush=True)


if __name__ == "__main__":
    main()
