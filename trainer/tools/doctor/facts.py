"""The answers of the probe: plain records, which its process sends and tests build by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


class Facts:
    """The answer to one question."""

    question: ClassVar[str]
    limit: ClassVar[float]  # seconds until the answer
    remedy: ClassVar[str]  # if there is no answer


@dataclass(frozen=True)
class TorchFacts(Facts):
    """The build of torch; `cuda` and `hip` are versions or None."""

    question = "the import of torch"
    limit = 90.0  # the first import from a cold network disk
    remedy = "fix the error in the message; for a library or a symbol, reinstall torch"

    version: str
    cuda: str | None = None
    hip: str | None = None
    architectures: tuple[str, ...] = ()  # compiled for: sm_90, compute_90, gfx942

    @property
    def is_cpu_build(self) -> bool:
        return self.cuda is None and self.hip is None


@dataclass(frozen=True)
class GlooFacts(Facts):
    """The time of a sum over two processes of this machine, and the addresses that gloo used."""

    question = "the sum over two processes"
    limit = 20.0

    seconds: float
    addresses: tuple[str, ...]


@dataclass(frozen=True)
class Gpu:
    """One GPU as torch sees it; `architecture` is AMD's name (gfx942) or None."""

    name: str
    uuid: str
    capability: tuple[int, int]
    architecture: str | None
    total_bytes: int
    bf16: bool


@dataclass(frozen=True)
class GpuFacts(Facts):
    """The GPUs, or the error that torch gives for them."""

    question = "the start of CUDA"
    limit = 30.0
    remedy = "see nvidia-smi and `dmesg | grep -i xid`; restart the driver or the machine"

    gpus: tuple[Gpu, ...] = ()
    driver_cuda: tuple[int, int] | None = None  # newest CUDA of the driver; None: no driver library
    error: str | None = None
