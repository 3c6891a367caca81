"""Building DeepSpeed's operations ahead: they load where no compiler is, and are for the processor that was named."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.docker.isolation import DOCKER
from tests.helpers.processes import ROOT, run

SCRIPT = DOCKER / "prebuild_ops.py"
OPERATION = "deepspeed_shm_comm"
SHORT_SOURCE = """
#include <Python.h>
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "operation", nullptr, -1, nullptr};
PyMODINIT_FUNC PyInit_deepspeed_shm_comm_op() { return PyModule_Create(&definition); }
"""
"""Stands in for sources that take minutes to compile."""

DRIVER = """
import os, runpy, subprocess, sys
script = runpy.run_path(sys.argv[1])
script["build"]("x86-64-v3", (sys.argv[2],))
from deepspeed.ops.op_builder.all_ops import ALL_OPS
print(*script["_extension"](ALL_OPS["cpu_adam"], "x86-64-v3").extra_compile_args["cxx"], flush=True)
try:
    script["check"]((sys.argv[2], "cpu_adam"))
except subprocess.CalledProcessError:
    print("not built, not loaded")
"""


@pytest.mark.slow
def test_operations_are_built_ahead_and_found(tmp_path: Path):
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    pytest.importorskip("ninja")
    installed = Path(str(importlib.metadata.distribution("deepspeed").locate_file("deepspeed")))
    shutil.copytree(installed, tmp_path / "deepspeed", ignore=shutil.ignore_patterns("__pycache__"))
    sources = tmp_path / "deepspeed" / "ops" / "csrc" / "cpu" / "comm"
    (sources / "shm_interface.cpp").write_text(SHORT_SOURCE)
    (sources / "shm.cpp").write_text("")
    variables = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{tmp_path}:{ROOT}",
        "DS_ACCELERATOR": "cpu",
    }
    built = run([sys.executable, "-c", DRIVER, SCRIPT, OPERATION], **variables)
    assert built.returncode == 0, built.stdout + built.stderr
    assert f"{OPERATION} {tmp_path}/deepspeed/ops/comm/{OPERATION}_op" in built.stdout
    assert "not built, not loaded" in built.stdout, "the check can fail"
    assert "-march=x86-64-v3" in built.stdout
    assert "-D__AVX256__" in built.stdout
    assert "native" not in built.stdout, "an image for this machine alone"
