"""The questions of the probe, with stand-ins for torch; `test_doctor.py` uses the real torch."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.tools.doctor import asking
from trainer.tools.doctor.facts import ExerciseFacts, GpuFacts, TorchFacts


def torch_of(cuda: str | None = None, hip: str | None = None, **of_cuda: Any) -> Any:
    """Return a stand-in for torch with this build and these functions of `torch.cuda`."""
    return SimpleNamespace(
        __version__="2.13.0",
        version=SimpleNamespace(cuda=cuda, hip=hip),
        distributed=SimpleNamespace(is_available=lambda: True, is_nccl_available=lambda: True),
        cuda=SimpleNamespace(nccl=SimpleNamespace(version=lambda: (2, 27, 5)), **of_cuda),
        _C=SimpleNamespace(_cuda_getArchFlags=lambda: "sm_90 compute_90"),
    )


def test_the_build():
    assert asking.torch_facts(torch_of()) == TorchFacts("2.13.0")
    assert asking.torch_facts(torch_of(cuda="12.8")) == TorchFacts(
        "2.13.0", cuda="12.8", architectures=("sm_90", "compute_90"), nccl="2.27.5"
    )
    without_nccl = torch_of(hip="6.4")
    without_nccl.distributed.is_nccl_available = lambda: False
    assert asking.torch_facts(without_nccl).nccl is None


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


def test_gpus_and_which_are_not_peers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(asking, "driver_cuda", lambda: (12, 8))
    torch = torch_of(
        cuda="12.8",
        init=lambda: None,
        device_count=lambda: 3,
        get_device_properties=properties,
        can_device_access_peer=lambda one, other: (one, other) != (0, 2),
    )
    facts = asking.gpu_facts(torch)
    assert [gpu.bf16 for gpu in facts.gpus] == [True, False, False]
    assert [gpu.uuid for gpu in facts.gpus] == ["aa-0", "aa-1", "aa-2"]
    assert facts.gpus[0].capability == (9, 0)
    assert facts.gpus[0].architecture is None
    assert facts.without_peers == ((0, 2),)
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
def test_the_driver_says_which_cuda_it_runs(monkeypatch: pytest.MonkeyPatch, number: int, version: tuple[int, int]):
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


class Matrix:
    """A square matrix of equal elements, represented by its sum."""

    def __init__(self, total: float) -> None:
        self.total = total

    def __matmul__(self, other: Matrix) -> Matrix:
        return Matrix(64.0 * self.total)

    def sum(self) -> Matrix:
        return self

    def item(self) -> float:
        return self.total


def used(number: int, ones: Any = None, all_reduce: Any = None) -> ExerciseFacts:
    """Return the facts from using this number of GPUs."""

    def add(matrices: list[Matrix]) -> None:
        for matrix in matrices:
            matrix.total *= len(matrices)

    torch = torch_of(cuda="12.8", device_count=lambda: number)
    torch.ones = ones or (lambda rows, columns, device: Matrix(64.0**2))
    torch.cuda.nccl.all_reduce = all_reduce or add
    return asking.exercise(torch)


def test_gpus_that_compute_and_sum():
    facts = used(3)
    assert facts.nccl_seconds is not None
    assert facts == ExerciseFacts(nccl_seconds=facts.nccl_seconds)


def test_gpus_that_do_not():
    def fail_on_one(rows: int, columns: int, device: str) -> Matrix:
        if device == "cuda:1":
            raise RuntimeError("no kernel image is available")
        return Matrix(64.0**2)

    assert used(2, fail_on_one).errors == ((1, "RuntimeError: no kernel image is available"),)
    wrong = used(2, lambda rows, columns, device: Matrix(7.0))
    assert wrong.errors[0] == (0, "ArithmeticError: a product of matrices of ones was wrong")
    assert used(2, all_reduce=lambda matrices: None).nccl_error == "ArithmeticError: the sum over the GPUs was wrong"
