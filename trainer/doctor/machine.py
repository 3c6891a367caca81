"""What a check may look at: the environment, the files of the system, the recipe, and the probe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.doctor.probe import Probe
from trainer.recipe.strategies import STRATEGIES, Strategy

if TYPE_CHECKING:
    from trainer.recipe.schema import Recipe


@dataclass(frozen=True)
class Machine:
    """This machine as seen by this process.

    Args:
        environ: the environment variables.
        probe: what is found out in another process.
        root: where `/proc`, `/sys` and `/dev` are looked for.
        recipe: the one that is to be run; None where nobody said.
        processes: the ranks that it is to be run on; None: as many as `trainer run` would start.
    """

    environ: Mapping[str, str]
    probe: Probe
    root: Path = Path("/")
    recipe: Recipe | None = None
    processes: int | None = None

    @property
    def strategy(self) -> Strategy | None:
        """Of the recipe."""
        return STRATEGIES[self.recipe.parallel.strategy] if self.recipe else None

    @property
    def needs_deepspeed(self) -> bool:
        """Whether the recipe does."""
        return self.strategy is not None and self.strategy.zero_stage > 0

    def path(self, absolute: str) -> Path:
        """A path of the system."""
        return self.root / absolute.lstrip("/")

    def read(self, absolute: str) -> str | None:
        """A small text file of the system; None where it is not there or may not be read."""
        try:
            return self.path(absolute).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    @property
    def container(self) -> str | None:
        """What kind of container this is, None where it seems to be none."""
        if "KUBERNETES_SERVICE_HOST" in self.environ:
            return "Kubernetes"
        if self.path("/.dockerenv").exists():
            return "Docker"
        if self.path("/run/.containerenv").exists():
            return "Podman"
        if "APPTAINER_CONTAINER" in self.environ or "SINGULARITY_CONTAINER" in self.environ:
            return "Apptainer"
        return None
