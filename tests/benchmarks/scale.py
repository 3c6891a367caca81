"""Messages of a rank from its start to the end of its first step, and the work of a simulated rank of a large run.

The first table is of real processes on gloo that train the sample for one step: questions to the store (each once,
however often it is asked), calls of collectives and of single messages, and the growth of resident memory. Those of
torch, which connects each pair of ranks, are counted apart. The second is of rank 0 of a fake process group: its
collectives return at once, and rank 0 decodes a message of every rank. From the root of the repository:

    python -m tests.benchmarks.scale --processes 2 4 8 16 32 --simulate 2 32 1024
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from unittest import mock

import torch.distributed as dist

from tests.benchmarks.startup import OVERRIDES
from tests.helpers.memory import status_bytes

_COLLECTIVES = ("all_reduce", "all_gather", "gather", "broadcast", "barrier", "send", "recv", "new_group")
_SECONDS = 900


@dataclass
class Counts:
    """Messages of one rank."""

    store: set[tuple[str, str]] = field(default_factory=set)
    torchs: set[tuple[str, str]] = field(default_factory=set)
    calls: Counter[str] = field(default_factory=Counter)
    memory: int = 0

    def cells(self) -> list[int]:
        """Return the questions of the trainer and of torch, collectives, single messages, and MB."""
        single = self.calls["send"] + self.calls["recv"]
        return [len(self.store), len(self.torchs), self.calls.total() - single, single, self.memory >> 20]


class CountingStore(dist.Store):  # type: ignore[misc,name-defined]  # torch's stub omits it
    """A store that notes the questions of this rank; those of torch's process groups have its prefix."""

    def __init__(self, store: Any, counts: Counts) -> None:
        super().__init__()
        self._store, self._counts = store, counts

    def _note(self, method: str, keys: str | Sequence[str]) -> None:
        for key in [keys] if isinstance(keys, str) else keys:
            (self._counts.torchs if "group/" in key else self._counts.store).add((method, key))

    def set(self, key: str, value: Any) -> None:
        self._note("set", key)
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self._note("get", key)
        value: bytes = self._store.get(key)
        return value

    def add(self, key: str, amount: int) -> int:
        self._note("add", key)
        number: int = self._store.add(key, amount)
        return number

    def append(self, key: str, value: Any) -> None:
        self._note("append", key)
        self._store.append(key, value)

    def compare_set(self, key: str, expected: Any, value: Any) -> bytes:
        self._note("compare_set", key)
        answer: bytes = self._store.compare_set(key, expected, value)
        return answer

    def check(self, keys: list[str]) -> bool:
        self._note("check", keys)
        return bool(self._store.check(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._note("wait", keys)
        self._store.wait(keys, *([timeout] if timeout else []))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._note("get", keys)
        return [self._store.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        self._note("set", keys)
        for key, value in zip(keys, values, strict=True):
            self._store.set(key, value)

    def has_extended_api(self) -> bool:
        return True


def counted_rank(rank: int, size: int, port: int, folder: str, answers: Any) -> None:
    """Train one step as a rank, and put its counts in the queue."""
    os.environ["LOCAL_RANK"] = str(rank)
    from trainer.ranks import joining
    from trainer.ranks.environment import LaunchEnvironment
    from trainer.ranks.stopping import StopRequest
    from trainer.recipe.reading.loading import load_recipe
    from trainer.training.run import train

    counts, open_store = Counts(), joining._store
    patches = [mock.patch.object(joining, "_store", lambda *args: CountingStore(open_store(*args), counts))]
    patches += [mock.patch.object(dist, name, _counted(name, getattr(dist, name), counts)) for name in _COLLECTIVES]
    overrides = (*OVERRIDES, f"checkpoint.folder={folder}/{size}", f"data.cache={folder}/cache", *batch_of(size))
    before = status_bytes("VmRSS")
    for patch in patches:
        patch.start()
    environment = LaunchEnvironment("variables", rank, rank, size, size, "127.0.0.1", port)
    with StopRequest() as stop:
        train(load_recipe("bert_sample", overrides), environment, stop, saves=False)
    counts.memory = status_bytes("VmHWM") - before
    answers.put((rank, counts.cells()))


def batch_of(size: int) -> list[str]:
    """Return the overrides that give each rank one row."""
    return [f"training.global_batch_size={size}", "training.micro_batch_size=1", "logging.to=[]"]


def _counted(name: str, function: Callable[..., Any], counts: Counts) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        counts.calls[name] += 1
        return function(*args, **options)

    return call


def count(size: int, folder: str) -> dict[int, list[int]]:
    """Run `size` ranks, and return the counts of each."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    context = multiprocessing.get_context("fork")  # as `trainer run` does; torch is imported once
    answers = context.Queue()
    ranks = [context.Process(target=counted_rank, args=(rank, size, port, folder, answers)) for rank in range(size)]
    for process in ranks:
        process.start()
    try:
        return dict(answers.get(timeout=_SECONDS) for _ in ranks)
    finally:
        for process in ranks:
            process.join(60)
            process.kill()


def simulate(size: int, folder: str, answers: Any) -> None:
    """Build rank 0 of `size` ranks; put the CPU seconds of each part and the growth of memory in the queue."""
    import torch

    from trainer.parallel.mesh import ParallelMesh
    from trainer.ranks.environment import LaunchEnvironment
    from trainer.ranks.messages import decode, encode
    from trainer.recipe.plan import plan_run
    from trainer.recipe.reading.loading import load_recipe
    from trainer.tools.plan.simulated_rank import simulated_mesh
    from trainer.training.assembly import assemble
    from trainer.training.checking import prepare_checked
    from trainer.training.run_parts import facts_of

    places = (f"checkpoint.folder={folder}/simulated", f"data.cache={folder}/cache")
    recipe = load_recipe("bert_sample", (*OVERRIDES, *places, *batch_of(size), "parallel.strategy=fsdp")).recipe
    plan = plan_run(recipe, size)
    seconds, before = [], status_bytes("VmRSS")

    def timed(action: Callable[[], Any]) -> Any:
        start = time.process_time()
        result = action()
        seconds.append(time.process_time() - start)
        return result

    def gathered(mesh: Any, value: Any) -> list[Any]:
        return [decode(encode(value)) for _ in range(mesh.world_size)]

    context = simulated_mesh(plan, 0)
    with mock.patch.object(ParallelMesh, "gather", gathered), torch.random.fork_rng():
        data, models = timed(lambda: prepare_checked(plan))
        mesh = timed(context.__enter__)
        parts = timed(lambda: assemble(plan, mesh, data, models=models))
        timed(
            lambda: (facts_of(parts, LaunchEnvironment("variables", world_size=size)), next(iter(parts.train_loader)))
        )
        growth = status_bytes("VmHWM") - before
        context.__exit__(None, None, None)
    answers.put([*(f"{1000 * one:.0f}" for one in seconds), str(growth >> 20)])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="*", default=[2, 4, 8], help="numbers of real ranks")
    parser.add_argument("--simulate", type=int, nargs="*", default=[2, 32, 1024], help="numbers of simulated ranks")
    options = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"
    import trainer.training.run  # noqa: F401  before the fork

    with tempfile.TemporaryDirectory() as folder:
        print(
            "| ranks | rank | questions to the store | torch's questions | collectives | single messages | memory, MB |"
        )
        print("|---|---|---|---|---|---|---|")
        for size in options.processes:
            found = count(size, folder)
            for name, rank in (("rank 0", 0), (f"rank {size - 1}", size - 1)):
                print(f"| {size} | {name} | {' | '.join(map(str, found[rank]))} |", flush=True)
        print("\nCPU time of a simulated rank, in ms:\n")
        print("| ranks | data | mesh | model and engine | summary and batch | memory, MB |")
        print("|---|---|---|---|---|---|")
        context = multiprocessing.get_context("spawn")
        for size in options.simulate:
            answers = context.Queue()
            process = context.Process(target=simulate, args=(size, folder, answers))
            process.start()
            print(f"| {size} | {' | '.join(answers.get(timeout=_SECONDS))} |", flush=True)
            process.join()


if __name__ == "__main__":
    main()
