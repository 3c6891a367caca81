"""Build DeepSpeed's operations for CPUs into the installed package, so that a run compiles nothing at start.

DeepSpeed can build them during its installation, but only for the processor of the build machine (`-march=native`). An
image runs on other machines. This script builds the operations from DeepSpeed's descriptions for a named processor and
rewrites DeepSpeed's record of its installation. Finally it loads each operation without a compiler.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

OPERATIONS = ("deepspeed_shm_comm",)
"""The operations that the trainer loads: on CPUs only, because its optimizers are torch's own, also with offload."""

VECTORS = {"x86-64": "-D__SCALAR__", "x86-64-v3": "-D__AVX256__", "x86-64-v4": "-D__AVX512__", "armv8-a": "-D__NEON__"}
"""The compiler's name of a processor, and the macro of DeepSpeed's sources for its vector instructions."""

_LOAD = """
import sys
from deepspeed.ops.op_builder.all_ops import ALL_OPS
for name in sys.argv[1:]:
    print(name, ALL_OPS[name].load().__file__)
"""


def build(processor: str, names: Iterable[str]) -> None:
    """Compile the operations `names` into the installed deepspeed and rewrite its record."""
    import deepspeed
    from deepspeed.ops.op_builder.all_ops import ALL_OPS
    from setuptools import Distribution
    from torch.utils.cpp_extension import BuildExtension

    package = Path(deepspeed.__file__).parent
    os.chdir(package / "ops")  # sources and include folders are relative to it
    extensions = [_extension(ALL_OPS[name], processor) for name in names]
    command = BuildExtension(Distribution({"name": "deepspeed-operations", "ext_modules": extensions}))
    with tempfile.TemporaryDirectory() as objects:
        command.build_lib, command.build_temp = str(package.parent), objects
        command.ensure_finalized()
        command.run()
    _record(package, {name: name in names for name in ALL_OPS})


def _extension(builder: Any, processor: str) -> Any:
    builder.cpu_arch = lambda: f"-march={processor}"
    builder.simd_width = lambda: VECTORS[processor]
    extension = builder.builder()
    extension.extra_compile_args["cxx"].append("-g0")  # DeepSpeed asks for debugging symbols
    return extension


def _record(package: Path, installed: dict[str, bool]) -> None:
    """Write the file in which deepspeed looks up its installed operations and their torch version."""
    import torch
    from deepspeed.git_version_info import git_branch, git_hash, version

    torch_info = {
        "version": ".".join(torch.__version__.split(".")[:2]),
        "bf16_support": False,
        "cuda_version": ".".join((torch.version.cuda or "0.0").split(".")[:2]),
        "nccl_version": "0.0",
        "hip_version": "0.0",
    }
    values = {
        "version": version,
        "git_hash": git_hash,
        "git_branch": git_branch,
        "installed_ops": installed,
        "accelerator_name": "cpu",
        "torch_info": torch_info,
    }
    lines = [f"{name} = {value!r}\n" for name, value in values.items()]
    (package / "git_version_info_installed.py").write_text("".join(lines), encoding="utf-8")


def check(names: Iterable[str]) -> None:
    """Load each operation in a new process without a compiler and without a writable build folder.

    Raises:
        subprocess.CalledProcessError: an operation cannot be loaded.
    """
    with tempfile.TemporaryDirectory() as nothing:
        os.chmod(nothing, 0o555)
        environment = os.environ | {"PATH": nothing, "TORCH_EXTENSIONS_DIR": f"{nothing}/none", "CXX": "", "CC": ""}
        subprocess.run([sys.executable, "-c", _LOAD, *names], env=environment, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processor", choices=VECTORS, default="x86-64-v3", help="the oldest supported processor")
    parser.add_argument("--only", action="append", metavar="NAME", help="build only this operation; may be repeated")
    arguments = parser.parse_args()
    os.environ["DS_ACCELERATOR"] = "cpu"
    names = tuple(arguments.only or OPERATIONS)
    build(arguments.processor, names)
    check(names)


if __name__ == "__main__":
    main()
