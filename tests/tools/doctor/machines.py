"""Fake machines: system files in a folder, variables in a dictionary, handmade facts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainer.tools.doctor.facts import Facts, GlooFacts, Gpu, GpuFacts, TorchFacts
from trainer.tools.doctor.finding import Finding
from trainer.tools.doctor.machine import Machine
from trainer.tools.doctor.probe import ProbeError

CPU = TorchFacts("2.13.0+cpu")
CUDA = TorchFacts("2.13.0", cuda="12.8", architectures=("sm_80", "sm_90", "compute_90"))
ROCM = TorchFacts("2.13.0", hip="6.4", architectures=("gfx90a", "gfx942"))
H100 = Gpu("NVIDIA H100", "aa-01", (9, 0), None, 80 * 2**30, bf16=True)
T4 = Gpu("Tesla T4", "aa-02", (7, 5), None, 16 * 2**30, bf16=False)
MI300 = Gpu("AMD Instinct MI300X", "aa-03", (9, 4), "gfx942", 192 * 2**30, bf16=True)


class FakeProbe:
    """A probe with the given facts; the default is a machine without GPUs."""

    def __init__(self, *facts: Facts | ProbeError) -> None:
        defaults: tuple[Facts, ...] = (CPU, GlooFacts(0.03, ("10.0.0.7",)), GpuFacts())
        self._known: dict[Any, Facts | ProbeError] = {type(fact): fact for fact in defaults}
        self._known |= {fact.kind if isinstance(fact, ProbeError) else type(fact): fact for fact in facts}

    def facts(self, kind: type[Any]) -> Any:
        known = self._known[kind]
        if isinstance(known, ProbeError):
            raise known
        return known


class ProbeWithoutTorch:
    """A probe that could not import torch, so every question fails."""

    def facts(self, kind: type[Any]) -> Any:
        raise ProbeError("ImportError: no torch", TorchFacts)


def without_torch() -> Machine:
    """Return a machine that cannot import torch."""
    return Machine({"PATH": "/nowhere"}, ProbeWithoutTorch(), Path("/nowhere"))


def machine(
    root: Path = Path("/nowhere"),
    *facts: Facts | ProbeError,
    files: Mapping[str, str] | None = None,
    **environ: str,
) -> Machine:
    """Return a machine with these facts, files (a path that ends with a slash is a folder) and variables."""
    for path, text in (files or {}).items():
        place = root / path.lstrip("/")
        (place if path.endswith("/") else place.parent).mkdir(parents=True, exist_ok=True)
        if not path.endswith("/"):
            place.write_text(text)
    return Machine({"PATH": "/nowhere"} | environ, FakeProbe(*facts), root)


def answers(check: Callable[[Machine], Finding], at: Machine) -> tuple[str, str]:
    """Return status and value; check that there is a remedy if and only if the status is not ok."""
    finding = check(at)
    assert (finding.remedy is None) == (finding.status == "ok")
    return finding.status, finding.value
