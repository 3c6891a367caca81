from __future__ import annotations

import pytest

from trainer.base.errors import UsageError
from trainer.recipe import elastic_launch as module


def test_an_elastic_launch_needs_a_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "sole", lambda kind: None)
    with pytest.raises(UsageError, match=r"torchrun's --nnodes 1:4 lets nodes join .*; use --nnodes 4$"):
        module.elastic_launch((1, 4))
