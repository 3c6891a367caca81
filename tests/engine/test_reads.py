"""The host reads no value of the device in a step: counted on fake tensors, which have no values.

A read of a batch on the host is allowed. `make fake-gpu` finds copies that wait, too, as it knows the device of each
tensor.
"""

from __future__ import annotations

import traceback
from typing import Any
from unittest import mock

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.reads import READS
from tests.helpers.training import OPTIMIZERS, TINY_TASKS, parallel_keys, tiny_recipe
from trainer.engine.native import NativeEngine
from trainer.recipe.plan import plan_run
from trainer.tools.plan.simulated_step import plan_step

OF_THE_HOST = {"has_padding", "denominator_of"}
"""Functions that read masks and labels of the batch, which is on the host."""

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"parallel": parallel_keys("ddp", 2)}),
    "fp16": (1, {"precision": "fp16"}),
    "fsdp, bf16": (2, {"parallel": parallel_keys("fsdp", 2), "precision": "bf16"}),
    "tensor": (2, {"parallel": {"tensor": 2}}),
    "stages": (2, {"parallel": {"pipeline": {"stages": 2}}}),
    "graphs": (1, {"cuda_graphs": True}),
    **{name: (1, {"task": tiny.keys, "model": tiny.model}) for name, tiny in TINY_TASKS.items()},
    **{name: (1, keys) for name, keys in OPTIMIZERS.items()},
}
QUICK = ("ddp", "fsdp, bf16", "stages", "graphs", "causal_lm")


class Reads(TorchDispatchMode):
    """A list of the lines that read a value of another tensor than those of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in READS:
            lines = [frame for frame in traceback.extract_stack() if "/trainer/" in frame.filename]
            own = [frame for frame in lines if "/tools/plan/" not in frame.filename]
            if OF_THE_HOST.isdisjoint(frame.name for frame in own[-2:]):
                self.found.append(f"{function} at {own[-1].filename}:{own[-1].lineno}")
        return function(*args, **(kwargs or {}))


def reads(keys: dict[str, Any], ranks: int) -> tuple[int, list[str]]:
    """Return the number of planned steps, and the reads in all but the first, which looks for dropout without keys."""
    found: list[list[str]] = []
    begin_step = NativeEngine.begin_step

    def watched(engine: NativeEngine, *arguments: Any) -> Any:
        with Reads() as watch:
            read = begin_step(engine, *arguments)
        found.append(watch.found)
        return read

    with mock.patch.object(NativeEngine, "begin_step", watched):
        plan_step(plan_run(tiny_recipe(**keys), ranks), 0, 12, True)
    return len(found), [line for lines in found[1:] for line in lines]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in QUICK else pytest.mark.nightly) for case in CASES]
)
def test_a_step_reads_no_value_of_the_device(case: str):
    ranks, keys = CASES[case]
    steps, found = reads(keys, ranks)
    assert steps > 1
    assert found == []


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_a_step_of_zero_waits_once(strategy: str, precision: str):
    """The norm, which decides whether DeepSpeed skips the step, and the loss come in one copy."""
    pytest.importorskip("deepspeed")
    from trainer.features.deepspeed import internals
    from trainer.features.deepspeed.engine import ZeroEngine

    found, copies = [], []
    begin_step, read_once = ZeroEngine.begin_step, internals.numbers_read_once

    def watched(engine: ZeroEngine, *arguments: Any) -> Any:
        with Reads() as watch:
            read = begin_step(engine, *arguments)
        found.append(watch.found)
        return read

    def counted(*arguments: Any) -> Any:
        copies.append(1)
        return read_once(*arguments)

    keys = {"parallel": parallel_keys(strategy, 2), "precision": precision}
    with (
        mock.patch.object(ZeroEngine, "begin_step", watched),
        mock.patch.object(internals, "numbers_read_once", counted),
    ):
        plan_step(plan_run(tiny_recipe(**keys), 2), 0, 12, True)
    assert len(copies) == len(found) > 1
    lines = {line.partition(" at ")[2] for line in found[-1]}
    assert len(found[-1]) == 2  # the two numbers of the copy
    assert len(lines) == 1
    assert "features/deepspeed/internals.py" in lines.pop()


def test_a_read_by_the_host_is_detected(monkeypatch: pytest.MonkeyPatch):
    update = NativeEngine._update
    monkeypatch.setattr(
        NativeEngine, "_update", lambda self, rate, norm, flag: update(self, rate, norm * norm.item(), flag)
    )
    _, (line, *_) = reads({}, 1)
    assert line.startswith("aten._local_scalar_dense.default at ")
