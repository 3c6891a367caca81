"""The questions of the probe, with stand-ins for torch; `test_doctor.py` uses the real torch."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.tools.doctor import asking
from trainer.tools.doctor.facts import GpuFacts, TorchFacts


def torch_of(cuda: str | None = None, hip: str | None = None, **of_cuda: Any) -> Any:
    """Return a stand-in for torch with this build and these functions of `torch.cuda`."""
    return SimpleNamespace(
        __version__="2.13.0",
        version=SimpleNamespace(cuda=cuda, hip=hip),
        cuda=SimpleNamespace(**of_cuda),
        _C=SimpleNamespace(_cuda_getArchFlags=lambda: "sm_90 compute_90"),
    )


def test_the_build():
    assert asking.torch_facts(torch_of()) == TorchFacts("2.13.0")
    architectures = ("sm_90", "compute_90")
    assert asking.torch_facts(torch_of(cuda="12.8")) == TorchFacts("2.13.0", "12.8", architectures=architectures)
    assert asking.torch_facts(torch_of(hip="6.4")) == TorchFacts("2.13.0", hip="6.4", architectures=architectures)


def properties(index: int) -> Any:
    """Return the properties of a GPU: the first is an H100, the others are older."""
    return SimpleNamespace(
        name=f"GPU {index}",
        uuid=f"aa-{index}",
        major=7 if index else 9,
        minor=0,
        total_memory=2**34,
        gcnArchName="gfx942:sramecc+:xnack-",
    )


def test_gpus_are_described(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(asking, "driver_cuda", lambda: (12, 8))
    torch = torch_of(cuda="12.8", init=lambda: None, device_count=lambda: 3, get_device_properties=properties)
    facts = asking.gpu_facts(torch)
    assert [gpu.bf16 for gpu in facts.gpus] == [True, False, False]
    assert [gpu.uuid for gpu in facts.gpus] == ["aa-0", "aa-1", "aa-2"]
    assert facts.gpus[0].capability == (9, 0)
    assert facts.gpus[0].architecture is None
    assert facts.driver_cuda == (12, 8)


def test_gpus_of_amd_have_another_name():
    torch = torch_of(hip="6.4", init=lambda: None, device_count=lambda: 1, get_device_properties=properties)
    (gpu,) = asking.gpu_facts(torch).gpus
    assert (gpu.architecture, gpu.bf16) == ("gfx942", True)


def test_cuda_that_does_not_start(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(asking, "driver_cuda", lambda: None)

    def fail() -> None:
        raise RuntimeError("Found no NVIDIA driver on your system.\nPlease check that ...")

    assert asking.gpu_facts(torch_of()) == GpuFacts()
    assert asking.gpu_facts(torch_of(cuda="12.8", init=fail)) == GpuFacts(
        error="RuntimeError: Found no NVIDIA driver on your system."
    )


@pytest.mark.parametrize(("number", "version"), [(12080, (12, 8)), (11040, (11, 4)), (13000, (13, 0))])
def test_the_cuda_version_is_read_from_the_driver(
    monkeypatch: pytest.MonkeyPatch, number: int, version: tuple[int, int]
):
    def get_version(place: Any) -> int:
        place._obj.value = number
        return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuDriverGetVersion=get_version))
    assert asking.driver_cuda() == version
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuDriverGetVersion=lambda place: 999))
    assert asking.driver_cuda() is None


def test_no_library_of_the_driver(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert asking.driver_cuda() is None
