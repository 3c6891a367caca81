from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.base.errors import UsageError
from trainer.engine import zero
from trainer.engine.compiling import CPU_OPERATION, prebuilt_operations


def package(**operations: bool) -> Any:
    """A DeepSpeed of which these operations were built, or not, when it was installed."""
    return SimpleNamespace(git_version_info=SimpleNamespace(installed_ops=operations))


def test_operations_that_were_built_at_installation():
    assert prebuilt_operations(package(fused_adam=True, cpu_adam=False)) == {"fused_adam"}


def test_a_compiler_is_asked_for_only_where_something_is_compiled(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOCAL_RANK", "0")  # put back afterwards: the import sets it
    monkeypatch.setattr(zero, "missing_tools", lambda: ["g++"])
    built = package(**{CPU_OPERATION: True})
    monkeypatch.setattr(zero, "import_deepspeed", lambda: built)
    assert zero._import_deepspeed(torch.device("cpu")) is built
    not_built = package(**{CPU_OPERATION: False})
    monkeypatch.setattr(zero, "import_deepspeed", lambda: not_built)
    with pytest.raises(UsageError, match=r"but g\+\+ is not on the PATH"):
        zero._import_deepspeed(torch.device("cpu"))
