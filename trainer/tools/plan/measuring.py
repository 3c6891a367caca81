"""A hardware file of this machine: operations, the host's work for them, and collectives.

Sizes and shapes differ from operation to operation, so small trainings time the operations of a CPU.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from scipy.optimize import nnls
from torch import Tensor, nn
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import spawn

from trainer.base.cgroup import machine_memory_bytes
from trainer.parallel.communication import all_gather_single, reduce_scatter_single
from trainer.ranks.environment import available_cores
from trainer.tools.plan import reference
from trainer.tools.plan.hardware import Machine
from trainer.tools.plan.ledger import Ledger
from trainer.tools.plan.pipeline_plan import plan_steps
from trainer.tools.plan.timing import kernel_of, step_time
from trainer.tools.plan.work import VIEW
from trainer.tools.writing import write_over

Points = list[tuple[float, float]]

_SECONDS = 0.12  # of each point
_TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_WIDTHS = {"cpu": (16, 64, 192, 384, 768), "cuda": (64, 256, 1024, 2048, 4096, 8192)}  # of square matrices
_NUMBERS = {"cpu": (2**10, 2**14, 2**17, 2**19, 2**22), "cuda": (2**12, 2**18, 2**22, 2**25, 2**27)}  # of a tensor
_BYTES = (2**12, 2**16, 2**19, 2**22, 2**24)  # of a collective
# An assumption: shares of the measured matrix products and memory, as in the files of known GPUs.
_UNMEASURED_SHARES = {"cuda": {"attention": [0.1, 0.2, 0.4], "reduction": [0.3, 0.5, 0.8]}}
_LOST = 1e-5  # seconds beside a collective; plans are linear in so few


def measure_machine(file: Path) -> dict[str, Any]:
    """Measure this machine, write its hardware file, and return the figures.

    Ranks that share a machine share its cores, so that CPUs are measured once for one rank and once for two.

    Raises:
        UsageError: the file cannot be written.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    counts = [1, 2] if device == "cpu" else sorted({1, torch.cuda.device_count()})
    found = {str(count): _of_ranks(device, count) for count in counts}
    ranks = {count: _figures(of_ranks) for count, of_ranks in found.items()}
    alone = ranks["1"]
    largest = {name: points[-1] for name, points in alone["matmul"].items()}
    size, seconds = alone["memory"][-1]
    linked = ranks[str(counts[-1])]["collectives"].get("allreduce_")
    memory = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else machine_memory_bytes()
    near = [0.8, 1, 1.1]
    same = {"attention": near, "reduction": near}  # each operation of a CPU is measured
    operation = [1e6 * ranks["1"]["host"][0] * factor for factor in (0.7, 1.0, 1.5)]
    figures: dict[str, Any] = {
        "memory_gb": memory / 1e9,
        "device": device,
        "teraflops": {name: flops / took / 1e12 for name, (flops, took) in largest.items()},
        "memory_gb_per_second": size / seconds / 1e9,
        "links_gb_per_second": {"measured": linked[-1][0] / linked[-1][1] / 1e9 if linked else 1.0},
        "network": "1x10Gb",
        "link_latency_us": {"inside": [0, 0, 0], "between": [50, 100, 200]},
        "operation_us": operation,
        "shares": {"matmul": near, "memory": near, "link": [0.7, 1, 1.2], **_UNMEASURED_SHARES.get(device, same)},
        "measured": ranks,
        "sources": {"all": f"measured by `trainer plan --measure`, torch {torch.__version__}; network: an assumption"},
    }
    for count, of_ranks in found.items():
        if steps := [rank["steps"] for rank in of_ranks if rank["steps"]]:
            machine = Machine("measured", int(count), "measured", 1.0, figures)
            ranks[count]["waiting"] = _waiting(machine, [max(seconds) for seconds in zip(*steps, strict=True)])
    write_over(file, json.dumps(figures, indent=1) + "\n", "--measure")
    return figures


def _of_ranks(device: str, number: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        # Processes and not threads: each rank needs a process group and a number of threads.
        spawn(_measure_rank, (number, device, folder), nprocs=number)  # type: ignore[no-untyped-call]
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(number)]


def _figures(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        **{
            table: {name: _median([rank[table][name] for rank in found]) for name in found[0][table]}
            for table in ("matmul", "kernels", "collectives")
        },
        **{name: _median([rank[name] for rank in found]) for name in ("memory", "special", "integer")},
        "host": [statistics.median(values) for values in zip(*(rank["host"] for rank in found), strict=True)],
        "overlap": statistics.median(rank["overlap"] for rank in found),
    }


def _waiting(machine: Machine, measured: Sequence[float]) -> dict[str, float]:
    """Return the seconds that ranks lose beside each collective, by its kind: waiting for others, and the host's work.

    They are the rest between a measured step and its plan by all other figures, divided by the plan's growth with them.
    `measured` are the seconds of a step of each training of `reference.of_strategies`.
    """
    waiting: dict[str, float] = {}
    rests: dict[str, list[float]] = defaultdict(list)
    for (kind, training), seconds in zip(reference.of_strategies(), measured, strict=True):
        plan = training.plan(machine.local_ranks)
        steps = plan_steps(plan, training.length, cuda=False)
        without, with_lost = (
            step_time(plan, steps, machine.with_waiting({**waiting, kind: lost})).likely for lost in (0.0, _LOST)
        )
        # A plan is linear in the lost seconds, so one further plan gives the slope.
        rests[kind].append(max(0.0, seconds - without) * _LOST / (with_lost - without))
        waiting[kind] = statistics.mean(rests[kind])
    return waiting


def _median(series: Sequence[Points]) -> Points:
    return [(points[0][0], statistics.median(seconds for _, seconds in points)) for points in zip(*series, strict=True)]


def _measure_rank(rank: int, number: int, device: str, folder: str) -> None:
    if device == "cpu":
        # As ranks of a run on this machine do: they share the cores.
        torch.set_num_threads(max(1, available_cores() // number))
    else:
        torch.cuda.set_device(rank)
    # Before the process group: these trainings are of this rank alone.
    operations = _operations() if device == "cpu" else {}
    if number > 1:
        store = FileStore(f"{folder}/store", number)
        dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=rank, world_size=number)
    try:
        found = _Measurement(device, number).points() | operations
        if device == "cpu" and number == 2:
            found["steps"] = [reference.seconds_of(training, number) for _, training in reference.of_strategies()]
    finally:
        if number > 1:
            dist.destroy_process_group()
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))


def _operations() -> dict[str, Any]:
    """Return the seconds of operations, and of the host for them, in small trainings on this rank alone."""
    steps = [reference.operations_of(training) for training in reference.of_operations()]
    return {"kernels": _kernels(one for _, found in steps for one in found), "host": _host(steps)}


def _host(steps: Iterable[tuple[float, Sequence[reference.Operation]]]) -> tuple[float, float]:
    """Return the seconds of the host for an operation, and the rate of those that grow with its bytes.

    Behind large tensors, the host's caches miss. The sums are as near to the rests of the steps beside their operations
    as they can be, in shares of the steps, and not negative.
    """
    work, rests = [], []
    for seconds, found in steps:
        moved = sum(one.amount.num_bytes for one in found) / _BYTES[-1]
        work.append((len(found) / seconds, moved / seconds))
        rests.append(1 - sum(one.seconds for one in found if one.kind.operation != VIEW) / seconds)
    # Least squares without negative results: more operations cannot cost less.
    (for_each, for_bytes), _ = nnls(work, rests)
    return max(1e-7, for_each), _BYTES[-1] / max(1e-12, for_bytes)


def _kernels(operations: Iterable[reference.Operation]) -> dict[str, Points]:
    """Return the mean sizes and seconds of each operation: floating-point operations, or else bytes."""
    groups: dict[str, dict[int, list[reference.Operation]]] = defaultdict(lambda: defaultdict(list))
    for one in operations:
        if one.kind.operation != VIEW and one.size > 0:
            # Sizes within a factor of two are averaged.
            groups[kernel_of(one.kind)][one.size.bit_length()].append(one)
    return {
        name: [
            (statistics.mean(one.size for one in same), statistics.mean(one.seconds for one in same))
            for _, same in sorted(sizes.items())
        ]
        for name, sizes in groups.items()
    }


class _Measurement:
    """The measurements of one rank, beside those of the others."""

    def __init__(self, device: str, number: int) -> None:
        self._device, self._number = device, number

    def points(self) -> dict[str, Any]:
        """Return pairs of size and seconds, and the seconds in which the host issues an operation."""
        matmul = {name: self._matmul(kind) for name, kind in _TYPES.items() if self._device == "cuda" or name != "fp16"}
        if self._device == "cuda" and torch.cuda.get_device_capability() >= (8, 0):
            torch.backends.cuda.matmul.allow_tf32 = True
            matmul["tf32"] = self._matmul(torch.float32)
            torch.backends.cuda.matmul.allow_tf32 = False
        memory = self._elementwise(lambda a, b: a + b, torch.float32, operands=2)
        return {
            "matmul": matmul,
            "memory": memory,
            "special": self._elementwise(lambda a, _: F.gelu(a), torch.float32, operands=1),
            "integer": self._elementwise(lambda a, b: a * b, torch.int64, operands=2),
            "collectives": self._collectives() if self._number > 1 else {},
            "kernels": {},
            "steps": [],
            "host": [self._operation()] if self._device == "cuda" else [],
            "overlap": self._overlap(),
        }

    def _seconds(self, work: Callable[[], Any], budget: float = _SECONDS) -> float:
        """Return the first quartile of the seconds of work; all ranks run it as often as each other."""
        # The first run may compile, allocate or connect.
        work()
        self._wait()
        start = time.perf_counter()
        work()
        self._wait()
        first = torch.tensor([time.perf_counter() - start])
        if self._number > 1:
            first = first.to(self._device)
            # All ranks must run the work equally often, because it may be a collective.
            dist.all_reduce(first, dist.ReduceOp.MAX)
        runs, found = max(3, min(300, int(budget / max(first.item(), 1e-7)))), []
        for _ in range(runs):
            start = time.perf_counter()
            work()
            self._wait()
            found.append(time.perf_counter() - start)
        # The first quartile: other programs of the machine make runs slower, never faster.
        return statistics.quantiles(found, n=4)[0]

    def _wait(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()

    def _matmul(self, dtype: torch.dtype) -> Points:
        found = []
        for width in _WIDTHS[self._device]:
            left, right = (torch.randn(width, width, device=self._device).to(dtype) for _ in range(2))
            found.append((2.0 * width**3, self._seconds(lambda left=left, right=right: left @ right)))  # type: ignore[misc]
        return found

    def _elementwise(self, work: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype, operands: int) -> Points:
        found = []
        for number in _NUMBERS[self._device]:
            tensors = [torch.ones(number, device=self._device, dtype=dtype) for _ in range(2)]
            moved = (operands + 1) * number * tensors[0].element_size()
            found.append((float(moved), self._seconds(lambda tensors=tensors: work(*tensors))))  # type: ignore[misc]
        return found

    def _collectives(self) -> dict[str, Points]:
        """Return the bytes and seconds of a round of a ring, or of a message, for each collective by torch's name."""
        ranks, rank = self._number, dist.get_rank()

        def exchange(whole: Tensor, _: Tensor) -> None:
            # Ranks 0 and 1 are a pair, 2 and 3, and so on.
            neighbour = rank ^ 1
            for sender in (0, 1) if neighbour < ranks else ():  # to the neighbour and back, in all pairs at once
                dist.send(whole, neighbour) if rank % 2 == sender else dist.recv(whole, neighbour)

        kinds: Mapping[str, tuple[float, int, Callable[[Tensor, Tensor], Any]]] = {
            "allreduce_": (1 / ranks, 2 * (ranks - 1), lambda whole, _: dist.all_reduce(whole)),
            "_allgather_base_": (1 / ranks, ranks - 1, all_gather_single()),
            "_reduce_scatter_base_": (
                1 / ranks, ranks - 1, lambda whole, part: reduce_scatter_single()(part, whole)
            ),
            "send": (1, 2, exchange),
        }  # fmt: skip
        found = defaultdict(list)
        for size in _BYTES:
            elements = size // 4 // ranks
            whole, part = (torch.zeros(elements * parts, device=self._device) for parts in (ranks, 1))
            for name, (share, rounds, call) in kinds.items():
                seconds = self._seconds(lambda call=call, whole=whole, part=part: call(whole, part))  # type: ignore[misc]
                found[name].append((size * share, seconds / rounds))
        return found

    def _operation(self) -> float:
        """Return the seconds of the host for an operation in training a small module."""
        width = 32
        layer = nn.TransformerEncoderLayer(width, 2, width, batch_first=True).to(self._device)
        rows = torch.zeros(2, 4, width, device=self._device)

        def step() -> None:
            layer.zero_grad()
            layer(rows).sum().backward()

        with Ledger() as ledger:
            step()
        number = sum(amount.number for amount in ledger.totals.work.values())
        return self._seconds(step) / number

    def _overlap(self) -> float:
        """Return the share of a collective that runs while the device computes."""
        if self._number == 1:
            return 0.0 if self._device == "cpu" else 1.0
        width = _WIDTHS[self._device][-2]
        matrix, tensor = torch.randn(width, width, device=self._device), torch.zeros(2**20, device=self._device)

        def compute() -> None:
            for _ in range(8):
                matrix @ matrix

        def both() -> None:
            work = dist.all_reduce(tensor, async_op=True)
            compute()
            assert work is not None
            work.wait()

        computed, sent = self._seconds(compute), self._seconds(lambda: dist.all_reduce(tensor))
        # The seconds that both together lack were hidden.
        hidden = computed + sent - self._seconds(both)
        return min(1.0, max(0.0, hidden / min(computed, sent)))
