"""The devices of a plan, from a text such as `8x80GiB`, `8xA100-80` or `2xmeasured.json`, and their speeds."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from trainer.base.cgroup import machine_memory_bytes
from trainer.base.errors import UsageError
from trainer.observe.meter import peaks
from trainer.ranks.environment import available_cores

_FILES = Path(__file__).parent / "hardware"
_UNITS = {"gb": 10**9, "gib": 2**30, "mb": 10**6, "mib": 2**20}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(GiB|GB|MiB|MB)", re.IGNORECASE)
_COUNTED = re.compile(r"(?:(\d+)\s*x\s*)?(.+)", re.IGNORECASE)
_NETWORK = re.compile(r"(?:(\d+)x)?(\d+(?:\.\d+)?)Gb")

LEAST, LIKELY, MOST = range(3)
"""The ends and the middle of a range of times."""


@dataclass(frozen=True)
class Cost:
    """The seconds of work of a given size."""

    latency: float  # seconds of the smallest work
    rate: float = math.inf  # size per second; ignored if there are points
    # measured pairs of size and seconds. Between them, logarithms are interpolated. Smaller work takes the seconds of
    # the first point, and larger work has the rate of the last one
    points: tuple[tuple[float, float], ...] = ()

    def seconds(self, size: float) -> float:
        if not self.points:
            return self.latency + size / self.rate
        first, last = self.points[0], self.points[-1]
        if size <= first[0]:
            return first[1]
        if size >= last[0]:
            return last[1] * size / last[0]
        (low, fast), (high, slow) = next(
            pair for pair in zip(self.points, self.points[1:], strict=False) if size <= pair[1][0]
        )
        # Costs span orders of magnitude, where a straight line between points would overrate small sizes.
        place = math.log(size / low) / math.log(high / low)
        return float(fast * (slow / fast) ** place)

    def scaled(self, factor: float) -> Cost:
        """Return the cost with all seconds multiplied."""
        points = tuple((size, seconds * factor) for size, seconds in self.points)
        return Cost(self.latency * factor, self.rate / factor, points)


@dataclass(frozen=True)
class Speed:
    """The costs of one device and its links."""

    matmul: Mapping[str, Cost]  # of a matrix product or attention by floating-point operations, for each type
    memory: Cost  # of reading and writing bytes
    attention: Cost  # of doing so in attention, which does more than matrix products with each element
    special: Cost  # of doing so with an exponential of each element
    reduction: Cost  # of doing so in sums and norms
    integer: Cost  # of doing so with integers of 64 bits
    inside: Cost  # of sending bytes to a device of the same machine
    between: Cost  # of sending bytes to another machine, for a device that has the network to itself
    host: Cost  # of moving bytes between host and device, and of the host's own memory traffic for a device
    # of the host for one operation, by its bytes: behind large ones, its caches miss
    operation: Cost
    # of operations that were measured, by `kernel_name`: by floating-point operations, or by bytes
    kernels: Mapping[str, Cost] = field(default_factory=dict)
    # of sending bytes in collectives that were measured, by torch's names
    collectives: Mapping[str, Cost] = field(default_factory=dict)
    # the seconds that ranks lose beside each collective, by its kind
    waiting: Mapping[str, float] = field(default_factory=dict)


def kernel_name(operation: str, dtype: str) -> str:
    """Return the name of an operation of torch on operands of a type, in hardware files."""
    return f"{operation} {dtype}"


@dataclass(frozen=True)
class Machine:
    """Machines of equal devices."""

    name: str
    local_ranks: int  # the devices of each machine
    link: str  # the link between them, a key of `links_gb_per_second`
    network_bytes: float  # the bytes that a machine sends to others in a second
    figures: Mapping[str, Any]
    shares_cores: bool = False  # whether the peak is that of the machine, which its ranks share

    @property
    def is_cpu(self) -> bool:
        """Whether host and device are the same processor, so that neither works while the other does."""
        return self.figures.get("device") == "cpu"

    @property
    def runs_kernels(self) -> bool:
        """Whether the project's kernels run: from compute capability 8.0 on, which began to compute in bf16."""
        return not self.is_cpu and "bf16" in self.figures["teraflops"]

    @property
    def _measured(self) -> Mapping[str, Any]:
        """The measurements of as many ranks as a machine has, or of the nearest smaller number; empty for others."""
        found = self.figures.get("measured", {})
        numbers = sorted(map(int, found))
        # Ranks of a CPU share its memory and caches, so speeds depend on their number.
        return found[str(max([n for n in numbers if n <= self.local_ranks], default=numbers[0]))] if numbers else {}

    @property
    def overlap(self) -> float:
        """The share of a collective that a device can run while it computes."""
        return float(self._measured.get("overlap", 0.0 if self.is_cpu else 1.0))

    def with_tf32(self) -> Machine:
        """Return the machine with fp32 matrix products and attention in TF32.

        Raises:
            UsageError: the device has no TF32.
        """
        if "tf32" not in self.figures["teraflops"]:
            raise UsageError(
                f"`tf32` is true, but {self.name} has no TF32 in its hardware file; set it to false, or plan for a GPU"
                " from the Ampere generation on"
            )
        # Measured points have precedence over data sheets, so the points of fp32 need the change too.
        measured = {
            count: {**found, "matmul": {**found["matmul"], "fp32": found["matmul"]["tf32"]}}
            for count, found in self.figures.get("measured", {}).items()
        }
        teraflops = {**self.figures["teraflops"], "fp32": self.figures["teraflops"]["tf32"]}
        return replace(self, figures={**self.figures, "teraflops": teraflops, "measured": measured})

    def with_waiting(self, seconds: Mapping[str, float]) -> Machine:
        """Return the measured machine with the seconds that ranks lose beside each collective, by its kind."""
        measured, count = self.figures["measured"], str(self.local_ranks)
        of_ranks = {**measured[count], "waiting": seconds}
        return replace(self, figures={**self.figures, "measured": {**measured, count: of_ranks}})

    def peak(self, precision: str) -> float:
        """Return the peak of one device in FLOP/s; types that it lacks are computed in fp32."""
        if points := self._measured.get("matmul", {}).get(precision):
            flops, seconds = points[-1]
            return float(flops / seconds)
        teraflops = self.figures["teraflops"]
        sharing = self.local_ranks if self.shares_cores else 1
        return 1e12 * float(teraflops.get(precision, teraflops["fp32"])) / sharing

    def speed(self, level: int) -> Speed:
        """Return the speed for the `LEAST`, `LIKELY` or `MOST` seconds."""
        figures, shares = self.figures, self.figures["shares"]

        def share(name: str) -> float:
            # Shares are listed from the smallest on.
            return 1 / float(shares[name][MOST - level])  # the largest share of a peak takes the `LEAST` seconds

        inside, between = (1e-6 * figures["link_latency_us"][where][level] for where in ("inside", "between"))
        measured = self._measured
        links = figures["links_gb_per_second"]
        memory, link = 1e9 * figures["memory_gb_per_second"], 1e9 * links[self.link]

        def cost(rate: float, points: Sequence[Sequence[float]] = ()) -> Cost:
            return Cost(0.0, rate, tuple((size, seconds) for size, seconds in points))

        def moving(name: str, kind: str) -> Cost:
            return cost(memory, measured.get(name, ())).scaled(share(kind))

        products = measured.get("matmul", {})
        matmul = {name: cost(self.peak(name), products.get(name, ())) for name in figures["teraflops"]}
        collectives = {
            name: cost(link, points).scaled(share("link")) for name, points in measured.get("collectives", {}).items()
        }
        # A collective without measured points costs as many seconds for each round as an all-reduce.
        sent = collectives.get("allreduce_", cost(link).scaled(share("link")))
        kernels = measured.get("kernels", {})
        operation = figures["operation_us"]
        return Speed(
            {name: found.scaled(share("matmul")) for name, found in matmul.items()},
            moving("memory", "memory"),
            moving("memory", "attention"),
            moving("special", "memory"),
            moving("memory", "reduction"),
            moving("integer", "memory"),
            Cost(inside, sent.rate, sent.points),
            Cost(between, self.network_bytes / share("link")),
            # An assumption: the memory of a host has the speed of its PCIe links, for each of its devices.
            Cost(0.0, 1e9 * links.get("pcie", min(links.values())) / share("link")),
            Cost(*measured.get("host", (1e-6 * operation[LIKELY],))).scaled(operation[level] / operation[LIKELY]),
            {name: cost(memory, points).scaled(share("memory")) for name, points in kernels.items()},
            collectives,
            {name: seconds * share("link") for name, seconds in measured.get("waiting", {}).items()},
        )


@dataclass(frozen=True)
class Devices:
    """The devices of one machine: their number, their name, the bytes of memory of each, and speeds if known.

    `host_bytes` is the memory of the machine beside its devices; None if it is unknown, or that of CPUs. `is_shared` is
    whether the devices are ranks on the processors of a machine, each with an equal part of its memory.
    """

    number: int
    name: str
    memory_bytes: int
    machine: Machine | None = None
    host_bytes: int | None = None
    is_shared: bool = False
    factor: float = 1.0  # on planned times, by a run (`rates.py`)
    rates_note: str | None = None

    @property
    def is_cpu(self) -> bool:
        """Whether their memory is that of the host; devices of unknown speed are GPUs."""
        return self.machine is not None and self.machine.is_cpu

    def numbered(self, number: int) -> Devices:
        """Return so many of these devices."""
        # The whole memory stays, and is divided by another number of ranks.
        memory = self.memory_bytes * self.number // number if self.is_shared else self.memory_bytes
        machine = self.machine and replace(self.machine, local_ranks=number)
        return replace(self, number=number, memory_bytes=memory, machine=machine)


def known_devices() -> list[str]:
    """Return the names of devices with a file in `hardware/`."""
    return sorted(file.stem for file in _FILES.glob("*.json"))


def device_named(name: str, memory_bytes: int | None = None) -> str | None:
    """Return the known device by torch's name of it, "NVIDIA A100-SXM4-80GB"; None if no file describes it.

    Devices of one model differ in memory: the name has it, or else `memory_bytes`, within an eighth.
    """
    words, gigabytes = set(re.split(r"[\s-]+", name.upper())), (memory_bytes or 0) / 1e9
    for known in known_devices():
        parts = known.upper().split("-")
        slower = (_SLOWER if any(part.isdigit() for part in parts[1:]) else {*_SLOWER, "PCIE"}) - {*parts}
        missing = [part for part in parts if part not in words and f"{part}GB" not in words]
        sizes = [int(part) for part in missing if part.isdigit()]
        # All words must match but the sizes of memory, which torch's name may leave out.
        same = slower.isdisjoint(words) and len(sizes) == len(missing)
        if same and all(abs(size - gigabytes) <= size / 8 for size in sizes):
            return known
    return None


_SLOWER = {"MIG", "LAPTOP", "NVL", "D", "Q", "TI", "SUPER"}
"""Words in names of variants that differ from the one of the file; so does a PCIe card of a model in one size."""


def parse_devices(
    text: str, link: str | None = None, network: str | None = None, host_memory: str | None = None
) -> Devices:
    """Return the devices of a text `NUMBERxMEMORY`, `NUMBERxNAME` or `NUMBERxFILE.json`; the number is 1 by default.

    Data sheets count memory in GB of 10**9 bytes; a device has at least these.

    Args:
        link: the link between them; None: the first one of the hardware file.
        network: the network of each machine, such as `100Gb` or `8x400Gb`; None: that of the hardware file.
        host_memory: the memory of each machine, such as `512GiB`; None: unknown.

    Raises:
        UsageError: the text has another form, no file describes the name, or a file is not a hardware file.
    """
    match = _COUNTED.fullmatch(text.strip())
    number, kind = (int(match[1] or 1), match[2]) if match else (0, "")
    if number < 1:
        raise UsageError(f"`--gpus` is {text!r}; write a number and a memory or a name, such as 8x80GiB or 8xA100-80")
    host_bytes = _host_bytes(host_memory)
    if size := _SIZE.fullmatch(kind):
        for option, value in (("--link", link), ("--network", network)):
            if value is not None:
                raise UsageError(f"`{option}` is {value}, but `--gpus` gives no device; use a name, such as 8xA100-80")
        return Devices(number, kind, int(float(size[1]) * _UNITS[size[2].lower()]), host_bytes=host_bytes)
    file = Path(kind) if kind.endswith(".json") else _known(text, kind)
    figures = _figures(file)
    is_host = file == _FILES / "CPU.json"
    machine = Machine(
        file.stem,
        number,
        _chosen(link, list(figures["links_gb_per_second"])),
        _network_bytes(network or figures["network"]),
        {**figures, **_of_this_processor(figures)} if is_host else figures,
        shares_cores=is_host,
    )
    gigabytes = figures["memory_gb"]
    memory = machine_memory_bytes() if gigabytes is None else int(gigabytes * 10**9)
    is_shared = machine.is_cpu and (gigabytes is None or "measured" in figures)
    if machine.is_cpu and host_bytes is not None:  # one memory, for one verdict
        memory, host_bytes, is_shared = host_bytes, None, True
    return Devices(number, file.stem, memory // number if is_shared else memory, machine, host_bytes, is_shared)


def _of_this_processor(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return the peak of the cores that this process may use, by their clock and vector units; empty if unknown."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return {}
    clock, flags = (re.search(rf"^{name}\s*: (.+)", text, re.MULTILINE) for name in ("cpu MHz", "flags"))
    if clock is None or flags is None:
        return {}
    # Two units for products with additions: 16 fp32 numbers with AVX-512, 8 with AVX2; else one addition of 4.
    known = {*flags[1].split()}
    kind, operations = ("AVX-512", 64) if "avx512f" in known else ("AVX2", 32) if "avx2" in known else ("SSE", 8)
    cores, gigahertz = available_cores(), float(clock[1]) / 1000
    source = f"an assumption: {cores} cores of this machine at {gigahertz:g} GHz with two {kind} units; bf16 no faster"
    teraflops = dict.fromkeys(figures["teraflops"], cores * gigahertz * operations / 1000)
    return {"teraflops": teraflops, "sources": {**figures["sources"], "teraflops": source}}


def _host_bytes(text: str | None) -> int | None:
    if text is None:
        return None
    size = _SIZE.fullmatch(text.strip())
    if size is None:
        raise UsageError(f"`--host-memory` is {text!r}; write the memory of each machine with a unit, such as 512GiB")
    return int(float(size[1]) * _UNITS[size[2].lower()])


def _known(text: str, kind: str) -> Path:
    """Return the file of a device; a name may leave out hyphens, the vendor, and all words but the model's."""
    names, meant = known_devices(), _letters(kind)
    found = [name for name in names if _letters(name) == meant] or [
        name for name in names if len(meant) > 2 and meant in name.lower().split("-")
    ]
    if len(found) != 1 and (known := device_named(kind)):
        found = [known]
    found = found or [name for name in names if len(meant) > 2 and meant in _letters(name)]
    if len(found) != 1:
        cutoff = 1.0 if meant in ("cuda", "gpu") else 0.4  # no device in particular; `cuda` is near to CPU
        near = found or get_close_matches(kind.upper(), names, n=3, cutoff=cutoff)
        hint = f"did you mean {' or '.join(near)}? Known devices" if near else "known devices"
        raise UsageError(
            f"`--gpus` is {text!r}, but no device is known as {kind!r}; {hint} are"
            f" {', '.join(names)}; or give its memory: 8x80GiB"
        )
    return _FILES / f"{found[0]}.json"


def _letters(name: str) -> str:
    return re.sub(r"[\W_]", "", name.lower())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _is_range(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(_is_number(item) or item == 0 for item in value)


def _is_table(check: Callable[[Any], bool], *names: str) -> Callable[[Any], bool]:
    """Return a check of an object that has these names and at least one row, with a check of each value."""
    return lambda value: (
        isinstance(value, dict) and bool(value) and {*names} <= {*value} and all(check(item) for item in value.values())
    )


_KEYS: Mapping[str, Callable[[Any], bool]] = {
    "memory_gb": _is_number,
    "teraflops": _is_table(_is_number, "fp32"),
    "memory_gb_per_second": _is_number,
    "links_gb_per_second": _is_table(_is_number),
    "network": lambda value: isinstance(value, str) and _NETWORK.fullmatch(value) is not None,
    "link_latency_us": _is_table(_is_range, "inside", "between"),
    "operation_us": lambda value: _is_range(value) and value[LIKELY] > 0,
    "shares": _is_table(
        lambda value: _is_range(value) and 0 not in value, "matmul", "attention", "memory", "reduction", "link"
    ),
}


def _figures(file: Path) -> dict[str, Any]:
    try:
        figures = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"`--gpus` names the file {file}, which cannot be read ({error.strerror}); write one with"
            " `trainer plan --measure FILE.json`"
        ) from error
    except ValueError as error:
        raise UsageError(f"`--gpus` names the file {file}, which is not JSON ({error}); measure again") from error
    if file.parent == _FILES and (row := peaks().get(file.stem)):  # runs measure their share of the same peaks
        figures = {**figures, "teraflops": row["teraflops"]}
        figures["sources"] = {**figures["sources"], "teraflops": row["source"]}
    for key, is_valid in _KEYS.items():
        found = figures.get(key) if isinstance(figures, dict) else None
        if key == "memory_gb" and found is None and figures.get("device") == "cpu":
            continue  # that of this machine
        if not is_valid(found):
            raise UsageError(
                f"`--gpus` names the file {file}, in which `{key}` is {found!r}; write it as the files of known devices"
                " do, or measure with `trainer plan --measure FILE.json`"
            )
    if any("host" not in found for found in figures.get("measured", {}).values()):
        raise UsageError(f"`--gpus` names the file {file}, which an earlier version measured; measure again")
    return dict(figures)


def _chosen(link: str | None, names: Sequence[str]) -> str:
    if link is None:
        return names[0]
    if link not in names:
        near = get_close_matches(link.lower(), names, n=1, cutoff=0.4) or names
        raise UsageError(f"`--link` is {link}, which this device does not have; use {' or '.join(near)}")
    return link


def _network_bytes(text: str) -> float:
    match = _NETWORK.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"`--network` is {text!r}; write the gigabits of each machine, such as 100Gb or 8x400Gb")
    return int(match[1] or 1) * float(match[2]) * 1e9 / 8
