from __future__ import annotations

import stat
import subprocess
from pathlib import Path

import pytest

from tests.tools.doctor.machines import CPU, CUDA, H100, MI300, ROCM, T4, answers, machine
from trainer.tools.doctor import gpus
from trainer.tools.doctor.facts import GpuFacts, TorchFacts

NODE = {"/dev/nvidia0": "", "/dev/nvidiactl": ""}
LOADED = {"/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5\n"}
NEW = GpuFacts((H100,), driver_cuda=(12, 8))
DOCKER = {"/.dockerenv": ""}


@pytest.mark.parametrize(
    ("torch", "files", "status", "value"),
    [
        (CPU, {}, "ok", "2.13.0+cpu, CPU build"),
        (CUDA, NODE, "ok", "2.13.0, CUDA 12.8 build"),
        (ROCM, {"/dev/kfd": ""}, "ok", "2.13.0, ROCm 6.4 build"),
        (CPU, NODE, "warning", "2.13.0+cpu, CPU build, but the machine has a GPU (/dev/nvidia0)"),
        (CPU, {"/dev/kfd": ""}, "warning", "2.13.0+cpu, CPU build, but the machine has a GPU (/dev/kfd)"),
    ],
)
def test_the_build_of_torch(tmp_path: Path, torch: TorchFacts, files: dict[str, str], status: str, value: str):
    assert answers(gpus.torch_build, machine(tmp_path, torch, files=files)) == (status, value)


def test_a_program_of_the_driver_is_a_sign_of_a_gpu_too(tmp_path: Path):
    answer_with(tmp_path, "")
    at = machine(tmp_path, PATH=str(tmp_path))
    assert answers(gpus.torch_build, at)[0] == "warning"
    assert answers(gpus.gpus, at) == ("ok", "none used: CPU build of torch")


@pytest.mark.parametrize(
    ("torch", "newest", "files", "status", "value"),
    [
        (CPU, None, {}, "ok", "none needed: CPU build of torch"),
        (ROCM, None, {}, "ok", "amdgpu of the kernel"),
        (CUDA, None, {}, "ok", "none: CPU only"),
        (CUDA, (12, 8), LOADED, "ok", "550.54.15, runs CUDA up to 12.8"),
        (CUDA, (13, 0), {}, "ok", "runs CUDA up to 13.0"),
        (CUDA, (12, 2), {}, "ok", "runs CUDA up to 12.2; torch's CUDA 12.8 runs by minor version compatibility"),
        (CUDA, (11, 4), LOADED, "problem", "550.54.15, runs CUDA up to 11.4, but torch is built for CUDA 12.8"),
        (CUDA, None, NODE, "problem", "/dev/nvidia0 exists, but libcuda.so.1 does not"),
        (
            CUDA,
            None,
            NODE | DOCKER,
            "problem",
            "/dev/nvidia0 exists, but libcuda.so.1 does not; NVIDIA_DRIVER_CAPABILITIES is not set",
        ),
    ],
)
def test_the_driver(
    tmp_path: Path,
    torch: TorchFacts,
    newest: tuple[int, int] | None,
    files: dict[str, str],
    status: str,
    value: str,
):
    at = machine(tmp_path, torch, GpuFacts((H100,), driver_cuda=newest), files=files)
    assert answers(gpus.driver, at) == (status, value)


@pytest.mark.parametrize(
    ("torch", "found", "value"),
    [
        (CPU, (), "none: CPU only"),
        (CUDA, (), "none: CPU only"),
        (CUDA, (H100, H100), "2 x NVIDIA H100, 80.0 GiB, sm_90, bf16"),
        (ROCM, (MI300,), "1 x AMD Instinct MI300X, 192.0 GiB, gfx942, bf16"),
    ],
)
def test_gpus_are_described(tmp_path: Path, torch: TorchFacts, found: tuple, value: str):
    assert answers(gpus.gpus, machine(tmp_path, torch, GpuFacts(found))) == ("ok", value)


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((9, 0), "sm_80 sm_90", True),
        ((8, 6), "sm_80", True),  # an earlier minor version of the same major one
        ((8, 0), "sm_86", False),
        ((7, 5), "sm_80 sm_90", False),
        ((12, 0), "sm_90 compute_90", True),  # PTX
        ((12, 0), "sm_90", False),
        ((8, 0), "compute_90", False),
        ((9, 0), "sm_90a", True),
        ((10, 0), "sm_90a compute_90a", False),
        ((10, 3), "sm_100f", True),
        ((12, 0), "sm_100f", False),
        ((12, 1), "sm_120", True),  # three digits
    ],
)
def test_compiled_code_runs_on_gpus_of_its_architectures(tmp_path: Path, capability, architectures: str, runs: bool):
    torch = TorchFacts("2.13.0", cuda="12.8", architectures=tuple(architectures.split()))
    gpu = GpuFacts((gpus.Gpu("GPU", "", capability, None, 2**34, True),))
    assert answers(gpus.gpus, machine(tmp_path, torch, gpu))[0] == ("ok" if runs else "problem")


def test_a_gpu_that_torch_was_not_compiled_for(tmp_path: Path):
    status, value = answers(gpus.gpus, machine(tmp_path, CUDA, GpuFacts((H100, T4))))
    assert status == "problem"
    assert value.endswith("; torch has no code for GPU 1 (sm_75), only for sm_80 sm_90 compute_90")
    other = GpuFacts((gpus.Gpu("AMD", "", (11, 0), "gfx1100", 2**34, True),))
    assert answers(gpus.gpus, machine(tmp_path, ROCM, other))[0] == "problem"


def test_gpus_that_torch_does_not_see(tmp_path: Path):
    files = {f"/dev/nvidia{index}": "" for index in (0, 1, 2, 10)}
    named = "1 x NVIDIA H100, 80.0 GiB, sm_90, bf16"
    assert answers(gpus.gpus, machine(tmp_path, CUDA, NEW, files=files)) == (
        "warning",
        f"{named}; 4 devices are there, from /dev/nvidia0 to /dev/nvidia10",
    )
    chosen = machine(tmp_path, CUDA, NEW, CUDA_VISIBLE_DEVICES="2")
    assert answers(gpus.gpus, chosen) == ("ok", f"{named}; CUDA_VISIBLE_DEVICES='2' hides 3 more")


@pytest.mark.parametrize(
    ("files", "environ", "status", "value"),
    [
        (NODE, {"CUDA_VISIBLE_DEVICES": ""}, "warning", "none: CPU only; CUDA_VISIBLE_DEVICES='' hides the GPUs"),
        (NODE, {}, "problem", "torch cannot use the GPU (/dev/nvidia0): RuntimeError: unknown error"),
        (
            DOCKER,
            {"NVIDIA_VISIBLE_DEVICES": "all"},
            "warning",
            "none: CPU only, but the container asks for GPUs (NVIDIA_VISIBLE_DEVICES=all)",
        ),
        (DOCKER, {"NVIDIA_VISIBLE_DEVICES": "void"}, "ok", "none: CPU only"),
        (DOCKER, {}, "ok", "none: CPU only"),
        ({}, {"NVIDIA_VISIBLE_DEVICES": "all"}, "ok", "none: CPU only"),
        (
            {},
            {"NVIDIA_VISIBLE_DEVICES": "all", "KUBERNETES_SERVICE_HOST": "10.0.0.1"},
            "warning",
            "none: CPU only, but the container asks for GPUs (NVIDIA_VISIBLE_DEVICES=all)",
        ),
    ],
)
def test_no_gpu_to_use(tmp_path: Path, files: dict[str, str], environ: dict[str, str], status: str, value: str):
    failed = GpuFacts(error="RuntimeError: unknown error")
    assert answers(gpus.gpus, machine(tmp_path, CUDA, failed, files=files, **environ)) == (status, value)


def test_a_device_that_may_not_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Root may open any file, so the test replaces the answer of the system."""

    def refuse(self: Path, *args: object, **keywords: object) -> None:
        raise PermissionError

    at = machine(tmp_path, CUDA, GpuFacts(error="RuntimeError: x"), files=NODE)
    monkeypatch.setattr(Path, "open", refuse)
    assert answers(gpus.gpus, at) == (
        "problem",
        "torch cannot use the GPU (/dev/nvidia0): this user may not open /dev/nvidia0",
    )


def answer_with(folder: Path, script: str) -> None:
    """Write a program named nvidia-smi."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(stat.S_IRWXU)


@pytest.mark.parametrize(
    ("script", "status", "value"),
    [
        ("echo 'GPU-aa-01, 79000'", "ok", "free: 77.1 GiB on GPU 0"),
        ("echo 'GPU-aa-01, 900'", "warning", "free: 900 MiB on GPU 0"),
        ("echo 'MIG-bb, 900'", "ok", "unknown: nvidia-smi names other GPUs"),
        (r"printf '\377, [N/A]'", "ok", "unknown: nvidia-smi names other GPUs"),
        ("echo 'Unable to determine the device handle' >&2; exit 15", "problem", "nvidia-smi failed: Unable to"),
        ("exit 9", "problem", "nvidia-smi failed: exit code 9"),
        ("exec sleep 9", "problem", "nvidia-smi did not answer within 0 s"),
    ],
)
def test_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, status: str, value: str):
    answer_with(tmp_path, script)
    if "sleep" in script:
        monkeypatch.setattr(gpus, "_SMI_SECONDS", 0.2)
    found = answers(gpus.gpu_memory, machine(tmp_path, CUDA, NEW, PATH=f"{tmp_path}:/bin"))
    assert (found[0], found[1][: len(value)]) == (status, value)


def test_an_nvidia_smi_of_another_architecture(tmp_path: Path):
    answer_with(tmp_path, "")
    (tmp_path / "nvidia-smi").write_bytes(b"\x7fELF")
    status, value = answers(gpus.gpu_memory, machine(tmp_path, CUDA, NEW, PATH=str(tmp_path)))
    assert (status, value) == ("problem", f"{tmp_path}/nvidia-smi cannot be started: Exec format error")


def test_free_memory_is_not_queried_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(subprocess, "run", None)
    assert answers(gpus.gpu_memory, machine(tmp_path, CUDA, NEW)) == ("ok", "unknown: there is no nvidia-smi")
    assert answers(gpus.gpu_memory, machine(tmp_path)) == ("ok", "no GPU in use")
