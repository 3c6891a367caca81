"""Checks of torch, the driver and the GPUs. A machine without a GPU is ok: it trains on its CPUs."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence

from trainer.tools.doctor.facts import Gpu, GpuFacts, TorchFacts
from trainer.tools.doctor.finding import Finding, ok, problem, size, warning
from trainer.tools.doctor.machine import Machine

_SMI_SECONDS = 10.0
_LITTLE_FREE = 0.5  # share of a GPU's memory
_CPU_ONLY = "none: CPU only"


def torch_build(machine: Machine) -> Finding:
    """The version of torch and its build: CPU, CUDA or ROCm."""
    facts = machine.probe.facts(TorchFacts)
    sign = _sign_of_gpu(machine)
    if facts.is_cpu_build and sign:
        return warning(
            f"{facts.version}, CPU build, but the machine has a GPU ({sign})",
            "install the build of torch for the GPU: https://pytorch.org/get-started/locally",
        )
    build = f"CUDA {facts.cuda}" if facts.cuda else f"ROCm {facts.hip}" if facts.hip else "CPU"
    return ok(f"{facts.version}, {build} build")


def driver(machine: Machine) -> Finding:
    """NVIDIA's driver, compared with the CUDA version of torch.

    A driver supports every CUDA of its own and older major versions ("minor version compatibility").
    """
    torch = machine.probe.facts(TorchFacts)
    if torch.hip is not None:
        return ok(f"amdgpu {machine.read('/sys/module/amdgpu/version') or 'of the kernel'}")
    if torch.cuda is None:
        return ok("none needed: CPU build of torch")
    newest = machine.probe.facts(GpuFacts).driver_cuda
    nodes = _nvidia_nodes(machine)
    if newest is None:
        if not nodes:
            return ok(_CPU_ONLY)
        capabilities = machine.environ.get("NVIDIA_DRIVER_CAPABILITIES")
        if machine.container:
            value = "not set" if capabilities is None else repr(capabilities)
            return problem(
                f"{nodes[0]} exists, but libcuda.so.1 does not; NVIDIA_DRIVER_CAPABILITIES is {value}",
                "start the container with NVIDIA_DRIVER_CAPABILITIES=compute,utility and NVIDIA's container toolkit",
            )
        return problem(
            f"{nodes[0]} exists, but libcuda.so.1 does not", "install the user-space libraries of NVIDIA's driver"
        )
    loaded = re.search(r"Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", machine.read("/proc/driver/nvidia/version") or "")
    named = f"{loaded[1]}, " if loaded else ""
    wanted = tuple(map(int, torch.cuda.split(".")[:2]))
    value = f"{named}runs CUDA up to {newest[0]}.{newest[1]}"
    if newest[0] < wanted[0]:
        return problem(
            f"{value}, but torch is built for CUDA {torch.cuda}",
            f"update the driver of the machine (not of the container), or install a torch for CUDA {newest[0]}.x",
        )
    if newest < wanted:
        value += f"; torch's CUDA {torch.cuda} runs by minor version compatibility"
    return ok(value)


def gpus(machine: Machine) -> Finding:
    """The GPUs that torch can use: names, memory, compute capability, bf16."""
    torch = machine.probe.facts(TorchFacts)
    if torch.is_cpu_build:
        return ok("none used: CPU build of torch" if _sign_of_gpu(machine) else _CPU_ONLY)
    facts = machine.probe.facts(GpuFacts)
    if not facts.gpus:
        return _no_gpus(machine, facts)
    value = _described(facts.gpus)
    for index, gpu in enumerate(facts.gpus):
        if not _is_compiled_for(torch, gpu):
            return problem(
                f"{value}; torch has no code for GPU {index} ({_architecture(gpu)}), only for"
                f" {' '.join(torch.architectures)}",
                "install a build of torch that supports the GPU: https://pytorch.org/get-started/locally",
            )
    nodes, hidden_by = _nvidia_nodes(machine), _hiding(machine)
    if len(facts.gpus) < len(nodes):
        if hidden_by is None:
            return warning(
                f"{value}; {len(nodes)} devices are there, from {nodes[0]} to {nodes[-1]}",
                "look for the others in the output of nvidia-smi and dmesg",
            )
        value += f"; {hidden_by} hides {len(nodes) - len(facts.gpus)} more"
    return ok(value)


def gpu_memory(machine: Machine) -> Finding:
    """The free memory of the GPUs, by nvidia-smi."""
    visible = machine.gpus
    if not visible:
        return ok("no GPU in use")
    program = shutil.which("nvidia-smi", path=machine.environ.get("PATH"))
    if program is None:
        return ok("unknown: there is no nvidia-smi")
    query = [program, "--query-gpu=uuid,memory.free", "--format=csv,noheader,nounits"]
    remedy = "see `dmesg | grep -i xid`; restart the machine, or have its GPU replaced"
    try:
        done = subprocess.run(query, capture_output=True, errors="replace", timeout=_SMI_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return problem(f"nvidia-smi did not answer within {_SMI_SECONDS:.0f} s", remedy)
    except OSError as error:
        return problem(f"{program} cannot be started: {error.strerror}", "install the programs of NVIDIA's driver")
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines() or [f"exit code {done.returncode}"]
        return problem(f"nvidia-smi failed: {lines[-1]}", remedy)
    free = {uuid.removeprefix("GPU-"): int(mib) * 2**20 for uuid, mib in re.findall(r"(\S+), (\d+)", done.stdout)}
    known = {index: free[gpu.uuid] for index, gpu in enumerate(visible) if gpu.uuid in free}
    if not known:
        return ok("unknown: nvidia-smi names other GPUs")
    value = "free: " + ", ".join(f"{size(num_bytes)} on GPU {index}" for index, num_bytes in known.items())
    if any(num_bytes < _LITTLE_FREE * visible[index].total_bytes for index, num_bytes in known.items()):
        return warning(value, "end the programs that hold the memory: nvidia-smi lists them")
    return ok(value)


def _nvidia_nodes(machine: Machine) -> list[str]:
    found = machine.path("/dev").glob("nvidia[0-9]*")
    return [f"/dev/{path.name}" for path in sorted(found, key=lambda path: int(re.sub(r"\D", "", path.name)))]


def _sign_of_gpu(machine: Machine) -> str | None:
    """Return a sign of a GPU, even of one that torch cannot use; None without a sign."""
    if nodes := _nvidia_nodes(machine):
        return nodes[0]
    for device in ("/dev/kfd", "/dev/dxg"):  # AMD's; NVIDIA's under WSL
        if machine.path(device).exists():
            return device
    return "nvidia-smi" if shutil.which("nvidia-smi", path=machine.environ.get("PATH")) else None


def _hiding(machine: Machine) -> str | None:
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    return next((f"{name}={machine.environ[name]!r}" for name in names if name in machine.environ), None)


def _no_gpus(machine: Machine, facts: GpuFacts) -> Finding:
    sign, hidden_by = _sign_of_gpu(machine), _hiding(machine)
    if sign is None:
        wanted = machine.environ.get("NVIDIA_VISIBLE_DEVICES", "void")
        if machine.container and wanted not in ("void", "none", ""):
            return warning(
                f"none: CPU only, but the container asks for GPUs (NVIDIA_VISIBLE_DEVICES={wanted})",
                "start it with `--gpus all` (Docker), `--device nvidia.com/gpu=all` (Podman), `--nv` (Apptainer) or a"
                " limit of nvidia.com/gpu (Kubernetes), on a machine with NVIDIA's container toolkit",
            )
        return ok(_CPU_ONLY)
    if hidden_by is not None:
        return warning(f"none: CPU only; {hidden_by} hides the GPUs", f"unset {hidden_by.split('=')[0]}")
    why = facts.error or "it sees none"
    closed = [node for node in _nvidia_nodes(machine) if not _can_open(machine, node)]
    if closed:
        return problem(
            f"torch cannot use the GPU ({sign}): this user may not open {', '.join(closed)}",
            "add the user to the group of the device (often video or render)",
        )
    return problem(
        f"torch cannot use the GPU ({sign}): {why}",
        "see the check `driver`; start a container with `--gpus all`; else restart the driver or the machine",
    )


def _can_open(machine: Machine, node: str) -> bool:
    try:
        machine.path(node).open("r+b", buffering=0).close()
    except OSError as error:
        return not isinstance(error, PermissionError)
    return True


def _architecture(gpu: Gpu) -> str:
    return gpu.architecture or "sm_{}{}".format(*gpu.capability)


def _described(found: Sequence[Gpu]) -> str:
    kinds = Counter(
        f"{gpu.name}, {size(gpu.total_bytes)}, {_architecture(gpu)}, {'bf16' if gpu.bf16 else 'no bf16'}"
        for gpu in found
    )
    return "; ".join(f"{number} x {kind}" for kind, number in kinds.items())


def _is_compiled_for(torch: TorchFacts, gpu: Gpu) -> bool:
    if not torch.architectures:
        return True
    if gpu.architecture is not None:
        return gpu.architecture in torch.architectures
    return any(_runs(name, gpu.capability) for name in torch.architectures)


def _runs(architecture: str, capability: tuple[int, int]) -> bool:
    """Source: CUDA C++ Programming Guide, "Application Compatibility" and "Feature Availability"."""
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", architecture)
    if match is None:
        return False
    code = int(match[2]), int(match[3])
    if match[4] == "a":  # one architecture only
        return code == capability
    if match[1] == "compute" and not match[4]:  # PTX, which any later GPU compiles
        return code <= capability
    # Binary code, and code of a family, runs on later minor versions of its major version only.
    return code[0] == capability[0] and code[1] <= capability[1]
