"""DeepSpeed is imported without the operation that it would compile, or is named as missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.helpers.processes import ROOT, finish, start
from tests.helpers.ranks import RankPools
from tests.helpers.tiny_run import write_tiny_run
from tests.helpers.training import tiny_recipe, train_tiny
from trainer.base.errors import UsageError
from trainer.features.deepspeed.package import import_deepspeed, ready_deepspeed, set_variables

REMEDY = r'pip install "recipe-trainer\[deepspeed\]"\) or use fsdp'


def test_nothing_is_compiled_when_ranks_meet(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("deepspeed")
    import_deepspeed()
    from deepspeed.comm.torch import build_shm_op
    from deepspeed.ops.op_builder.builder import OpBuilder

    monkeypatch.setattr(OpBuilder, "load", lambda self, verbose=True: pytest.fail(f"{self.NAME} is loaded"))
    assert build_shm_op() is None


def test_no_ranges_of_a_profiler_are_opened(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("deepspeed")
    import_deepspeed()
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils.nvtx import instrument_w_nvtx

    monkeypatch.setattr(type(get_accelerator()), "range_push", lambda *_, **__: pytest.fail("a range is opened"))
    assert instrument_w_nvtx(lambda x: x + 1)(2) == 3


WITHOUT_NVCC = """
import torch
from unittest import mock
torch.version.cuda = "13.0"
from trainer.features.deepspeed.package import import_deepspeed
import_deepspeed()
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder.builder import OpBuilder
from torch.utils.cpp_extension import CUDA_HOME
with (
    mock.patch.object(OpBuilder, "load", side_effect=AssertionError("an operation is loaded")),
    mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor),
):
    pinned = get_accelerator().pin_memory(torch.ones(2))
print(get_accelerator()._name, CUDA_HOME, pinned.sum().item())
"""


@pytest.mark.slow
def test_a_gpu_without_nvcc_imports_it_and_pins_memory_by_torch(tmp_path: Path):
    """As in the image for CUDA: no CUDA toolkit, and here no compiler either."""
    pytest.importorskip("deepspeed")
    environment = {"HOME": str(tmp_path), "PATH": str(tmp_path), "DS_ACCELERATOR": "cuda", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WITHOUT_NVCC]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("cuda None 2.0\n", "", 0)
    assert not list(tmp_path.iterdir())  # torch's cache of compiled operations


def train_without_builds(strategy: str, offload: str) -> list[float]:
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder.builder import OpBuilder

    def refuse(builder: Any, verbose: bool = False) -> None:
        raise AssertionError(f"{builder.NAME} is loaded")

    recipe = tiny_recipe(parallel={"strategy": strategy, "offload": offload}, precision="bf16")
    with (
        mock.patch.object(OpBuilder, "load", refuse),
        mock.patch.object(get_accelerator(), "reset_peak_memory_stats") as reset,
    ):
        losses = train_tiny(recipe, num_steps=2).losses
    reset.assert_not_called()
    return losses


@pytest.mark.parametrize(
    ("strategy", "offload"), [("zero3", "parameters"), pytest.param("zero2", "optimizer", marks=pytest.mark.slow)]
)
def test_steps_with_offload_compile_nothing_and_reset_no_peak(ranks: RankPools, strategy: str, offload: str):
    pytest.importorskip("deepspeed")
    losses, others = ranks(2).run(train_without_builds, strategy, offload)
    assert losses == others
    assert len(losses) == 2


@pytest.mark.parametrize(("number", "found"), [(0, "0"), (None, "1")])
def test_it_reads_the_number_of_the_visible_gpu(number: int | None, found: str):
    """A rank that sees one GPU has number 0 of it, whatever torchrun's variable is; on a CPU that one stays."""
    environ = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    set_variables(number, environ)
    assert environ == {"LOCAL_RANK": found, "LOCAL_WORLD_SIZE": "2", "LOCAL_SIZE": "2"}


def test_without_the_package(monkeypatch: pytest.MonkeyPatch):
    for name in ("LOCAL_RANK", "LOCAL_SIZE"):
        monkeypatch.setenv(name, "0")  # put back afterwards, since the function sets both
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(UsageError, match=REMEDY):
        ready_deepspeed(1)


@pytest.mark.slow
def test_a_missing_package_is_reported_by_one_rank(tmp_path: Path):
    package = tmp_path / "path" / "deepspeed"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('no module named deepspeed')")
    recipe = write_tiny_run(tmp_path / "tiny", parallel={"strategy": "zero3"})
    command = [sys.executable, "-m", "trainer", "run", recipe, "--processes", "2"]
    ended = finish(start(command, PYTHONPATH=str(package.parent)))
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.stderr.count("or use fsdp") == 1
    assert not (tmp_path / "tiny" / "run" / "model").exists()
