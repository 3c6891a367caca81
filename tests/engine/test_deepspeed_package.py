"""DeepSpeed is imported without the operation that it would compile, or is named as missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.helpers.processes import finish, start
from tests.helpers.tiny_run import write_tiny_run
from trainer.base.errors import UsageError
from trainer.engine.deepspeed_package import import_deepspeed, ready_deepspeed

REMEDY = r'pip install "recipe-trainer\[deepspeed\]"\) or use fsdp'


def test_nothing_is_compiled_when_ranks_meet(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("deepspeed")
    import_deepspeed()
    from deepspeed.comm.torch import build_shm_op
    from deepspeed.ops.op_builder.builder import OpBuilder

    monkeypatch.setattr(OpBuilder, "load", lambda self, verbose=True: pytest.fail(f"{self.NAME} is loaded"))
    assert build_shm_op() is None


def test_without_the_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOCAL_RANK", "0")  # put back afterwards, since the function sets it
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(UsageError, match=REMEDY):
        ready_deepspeed(1)


@pytest.mark.slow
def test_ranks_without_the_package_say_so_once(tmp_path: Path):
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
