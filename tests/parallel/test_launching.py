"""Launches that are found by their facts; the kernels here record their arguments."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.parallel import launching
from trainer.parallel.launching import Launch, facts_of, launch, operation

STREAM = 99


class Kernel:
    """A kernel of Triton with two tensors, a number and a constant, and the variants that it compiled."""

    arg_names = ("x", "y", "size", "WIDTH")

    def __init__(self, compiles: bool = True) -> None:
        self.compiles = compiles
        self.looked_up: list[tuple[Any, ...]] = []
        self.started: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def look_up(*arguments: Any, **constants: Any) -> Any:
            self.looked_up.append((grid, arguments, constants))
            # as a `CompiledKernel` of Triton
            return SimpleNamespace(run=self.run, function=1, packed_metadata=(4, 1, 0)) if self.compiles else None

        return look_up

    def run(self, *arguments: Any) -> None:
        before, own = arguments[:9], arguments[9:]
        assert before == (7, 1, 1, STREAM, 1, (4, 1, 0), None, None, None)
        self.started.append(own)


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setattr(launching, "_kept", {})
    monkeypatch.setattr(launching, "_current_stream", lambda: lambda: STREAM)


def start(kernel: Kernel, x: torch.Tensor, y: torch.Tensor) -> None:
    def plan() -> list[Launch]:
        return [Launch(kernel, (7,), (len(x),), {"WIDTH": 8, "num_warps": 4})]

    launch(("kernel", *facts_of(x, y)), [(x, y)], plan)


def test_the_second_launch_has_all_arguments_of_the_first():
    kernel, x, y = Kernel(), torch.zeros(16), torch.zeros(16)
    start(kernel, x, y)
    assert kernel.looked_up == [((7,), (x, y, 16), {"WIDTH": 8, "num_warps": 4})]
    other = torch.ones(16)
    start(kernel, other, y)
    assert len(kernel.looked_up) == 1
    ((first, second, *numbers),) = kernel.started
    assert first is other
    assert second is y
    assert numbers == [16, 8]


@pytest.mark.parametrize(
    "x",
    [torch.zeros(17), torch.zeros(16, dtype=torch.bfloat16), torch.zeros(32)[::2], torch.zeros(17)[1:]],
    ids=["shape", "type", "strides", "alignment"],
)
def test_other_tensors_are_looked_up_again(x):
    kernel, y = Kernel(), torch.zeros(16)
    start(kernel, torch.zeros(16), y)
    start(kernel, x, y)
    assert len(kernel.looked_up) == 2


def test_the_interpreter_keeps_nothing():
    kernel, x = Kernel(compiles=False), torch.zeros(16)
    for _ in range(2):
        start(kernel, x, x)
    assert len(kernel.looked_up) == 2


def test_old_launches_make_room(monkeypatch):
    monkeypatch.setattr(launching, "_MOST_KEPT", 2)
    kernel = Kernel()
    for size in (16, 32, 48, 16):
        start(kernel, torch.zeros(size), torch.zeros(size))
    assert len(kernel.looked_up) == 4
    assert len(launching._kept) == 2


@operation("trainer::scaled_in_a_test", "(Tensor x, float factor) -> Tensor")
def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_dispatch_modes_see_an_operation():
    x, name = torch.ones(2), "scaled_in_a_test"
    with Seen() as seen:
        assert scaled(x, 2.0).tolist() == [2.0, 2.0]
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        scaled(x, 2.0)
    assert seen.names == [f"trainer.{name}.default"]
    assert f"trainer::{name}" in {event.key for event in profiled.key_averages()}
    assert scaled(x, 3.0).tolist() == [3.0, 3.0]


def test_torch_warns_of_a_gradient_that_an_operation_lacks():
    x = torch.ones(2, requires_grad=True)
    with pytest.warns(UserWarning, match="scaled_in_a_test: an autograd kernel was not registered"):
        scaled(x, 2.0).sum().backward()
    with torch.no_grad():
        assert not scaled(x, 2.0).requires_grad
