"""The inputs of a check: environment variables, system files and the probe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainer.base.cgroup import read_file
from trainer.tools.doctor.facts import Gpu, GpuFacts, TorchFacts
from trainer.tools.doctor.probe import Probe


@dataclass(frozen=True)
class Machine:
    """This machine, as this process sees it."""

    environ: Mapping[str, str]
    probe: Probe
    root: Path = Path("/")  # folder of `/proc`, `/sys` and `/dev`

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs that torch can use."""
        return () if self.probe.facts(TorchFacts).is_cpu_build else self.probe.facts(GpuFacts).gpus

    def path(self, absolute: str) -> Path:
        """Return the path of a system file."""
        return self.root / absolute.lstrip("/")

    def read(self, absolute: str) -> str | None:
        """Return the text of a system file; None if it cannot be read."""
        return read_file(str(self.path(absolute)))

    @property
    def container(self) -> str | None:
        """The kind of container, or None."""
        if "KUBERNETES_SERVICE_HOST" in self.environ:
            return "Kubernetes"
        if self.path("/.dockerenv").exists():
            return "Docker"
        if self.path("/run/.containerenv").exists():
            return "Podman"
        if "APPTAINER_CONTAINER" in self.environ or "SINGULARITY_CONTAINER" in self.environ:
            return "Apptainer"
        return None
