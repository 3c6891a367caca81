"""Launches that are found by their facts; the kernels here record their arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainer.parallel.kernels import launching
from trainer.parallel.kernels.launching import Launch, facts_of, launch


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
            return {(*grid, 1, 1)[:3]: lambda *own: self.started.append(own)} if self.compiles else None

        return look_up


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setattr(launching, "_kept", {})


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
