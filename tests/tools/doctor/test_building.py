from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tests.tools.doctor.machines import CPU, CUDA, H100, answers, machine, without_torch
from trainer.engine.deepspeed_package import CPU_OPERATION
from trainer.tools.doctor import deepspeed_checks
from trainer.tools.doctor.facts import DeepSpeedFacts, GpuFacts
from trainer.tools.doctor.machine import Machine
from trainer.tools.doctor.probe import ProbeError

BUILT = DeepSpeedFacts("0.19.8", (CPU_OPERATION,), "/nowhere")
GPU = GpuFacts((H100,))
CHECKS = (deepspeed_checks.deepspeed, deepspeed_checks.operations, deepspeed_checks.build_folder)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Whether the package is installed; a test may change it."""
    package = {"is installed": True}
    monkeypatch.setattr(deepspeed_checks, "installed", lambda name: "0.19.8" if package["is installed"] else None)
    return package


def tools(folder: Path, *names: str) -> str:
    """Return a PATH with programs of these names."""
    for name in names:
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(stat.S_IRWXU)
    return str(folder)


def with_zero(*facts: object, **environ: str) -> Machine:
    return machine(Path("/nowhere"), *facts, recipe="bert_sample", overrides=("parallel.strategy=zero2",), **environ)


def test_an_import_that_works():
    assert answers(deepspeed_checks.deepspeed, machine()) == ("ok", "0.19.8")


def test_without_the_package_only_a_recipe_that_needs_it_has_a_problem(installed):
    installed["is installed"] = False
    assert [answers(check, machine())[0] for check in CHECKS] == ["ok"] * 3
    assert answers(deepspeed_checks.deepspeed, with_zero())[0] == "problem"


def test_an_import_that_fails():
    broken = ProbeError("ImportError: no CUDA_HOME", DeepSpeedFacts)
    value = "cannot be imported: ImportError: no CUDA_HOME"
    assert answers(deepspeed_checks.deepspeed, machine(Path(), broken)) == ("warning", value)
    assert answers(deepspeed_checks.deepspeed, with_zero(broken)) == ("problem", value)
    with pytest.raises(ProbeError, match="no torch"):  # which is the business of another line
        deepspeed_checks.deepspeed(without_torch())


def test_operations_that_are_there():
    assert answers(deepspeed_checks.operations, machine(Path(), BUILT)) == (
        "ok",
        f"built at installation: {CPU_OPERATION}",
    )
    status, value = answers(deepspeed_checks.operations, machine(Path(), CUDA, GPU))
    assert (status, value) == ("ok", "none needed on GPUs; none built at installation")


def test_what_is_compiled_on_first_use_needs_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "venv").mkdir()
    monkeypatch.setattr("sys.executable", str(tmp_path / "venv" / "python"))
    both = tools(tmp_path, "g++", "ninja")
    assert answers(deepspeed_checks.operations, machine(Path(), CPU, PATH=both))[0] == "ok"
    (tmp_path / "ninja").unlink()
    status, value = answers(deepspeed_checks.operations, machine(Path(), PATH=both))
    assert status == "warning"
    assert value.endswith("is compiled on first use, but ninja not on the PATH")
    assert answers(deepspeed_checks.operations, with_zero(PATH=both))[0] == "problem"
    tools(tmp_path / "venv", "ninja")
    assert answers(deepspeed_checks.operations, with_zero(PATH=both))[0] == "ok", "the one beside Python is used"


def test_the_folder_to_compile_in(tmp_path: Path):
    facts = DeepSpeedFacts("0.19.8", (), str(tmp_path / "torch_extensions"))
    assert answers(deepspeed_checks.build_folder, machine(Path(), facts))[0] == "ok"
    assert not (tmp_path / "torch_extensions").exists()
    closed = DeepSpeedFacts("0.19.8", (), "/proc/extensions")
    assert answers(deepspeed_checks.build_folder, machine(Path(), closed))[0] == "warning"
    assert answers(deepspeed_checks.build_folder, with_zero(closed))[0] == "problem"
    assert answers(deepspeed_checks.build_folder, machine(Path(), closed, CUDA, GPU))[0] == "ok"


def test_a_lock_that_a_killed_build_left(tmp_path: Path):
    lock = tmp_path / "py311_cpu" / CPU_OPERATION / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    facts = DeepSpeedFacts("0.19.8", (), str(tmp_path))
    with lock.open() as held:
        status, value = answers(deepspeed_checks.build_folder, machine(Path(), facts))
        assert (status, f"process {os.getpid()} compiles" in value) == ("ok", True), held
    assert answers(deepspeed_checks.build_folder, with_zero(facts)) == ("warning", f"{lock} was left by a killed build")
