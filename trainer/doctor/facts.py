"""What the probe finds out: plain records, which are sent from its process and can be made by hand in a test."""

from __future__ import annotations

from dataclasses import dataclass


class Facts:
    """What one question to the probe is answered with."""


@dataclass(frozen=True)
class TorchFacts(Facts):
    """The build of torch; `cuda` and `hip` are versions, None where the build has neither."""

    version: str
    cuda: str | None = None
    hip: str | None = None
    architectures: tuple[str, ...] = ()  # that it was compiled for: sm_90, compute_90, gfx942
    nccl: str | None = None

    @property
    def is_cpu_build(self) -> bool:
        """Whether it can use no GPU."""
        return self.cuda is None and self.hip is None


@dataclass(frozen=True)
class GlooFacts(Facts):
    """A sum over two processes of this machine: what it took, and the addresses that gloo listened on."""

    seconds: float
    addresses: tuple[str, ...]


@dataclass(frozen=True)
class Gpu:
    """One GPU as torch sees it; `architecture` is AMD's name of it (gfx942), None for NVIDIA's."""

    name: str
    uuid: str
    capability: tuple[int, int]
    architecture: str | None
    total_bytes: int
    bf16: bool


@dataclass(frozen=True)
class GpuFacts(Facts):
    """The GPUs, or why torch cannot use them."""

    gpus: tuple[Gpu, ...] = ()
    driver_cuda: tuple[int, int] | None = None  # the newest CUDA that the driver can run; None: no driver library
    error: str | None = None
    without_peers: tuple[tuple[int, int], ...] = ()  # pairs that cannot read each other's memory


@dataclass(frozen=True)
class ExerciseFacts(Facts):
    """What came of using the GPUs: an error by GPU, the seconds of a sum over all of them by NCCL, or its error."""

    errors: tuple[tuple[int, str], ...] = ()
    nccl_seconds: float | None = None
    nccl_error: str | None = None


@dataclass(frozen=True)
class DeepSpeedFacts(Facts):
    """DeepSpeed as it imports here: operations built at its installation, and where others are built."""

    version: str
    prebuilt: tuple[str, ...]
    build_root: str
