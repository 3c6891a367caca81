"""The kernel of AdamW: where it runs, what it reads and writes, and its tests in Triton's interpreter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.helpers.interpreting import run_interpreted
from tests.helpers.training import tiny_recipe
from trainer.engine.optimizers.base import OptimizerUpdate
from trainer.engine.optimizers.parameters import TrainedParameters
from trainer.engine.optimizers.table import build_optimizer
from trainer.features.adamw_kernel import operations
from trainer.features.adamw_kernel.update import AdamWUpdate, obstacle
from trainer.parallel.device_traits import DeviceTraits, planned_traits
from trainer.parallel.weight_copies import kept_copy
from trainer.recipe.plan import plan_run
from trainer.recipe.schema import AdamW
from trainer.tools.plan.simulated_step import plan_step

CUDA = torch.device("cuda")


@pytest.fixture
def assumed() -> Iterator[None]:
    """Take the kernels as running, as plans do."""
    with planned_traits(DeviceTraits(is_cpu=False, assumes_kernels=True)):
        yield


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_in_tritons_interpreter():
    run_interpreted(Path(__file__).with_name("interpreted_adamw.py"), timeout_seconds=600)


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_further_trainings_in_tritons_interpreter():
    run_interpreted(Path(__file__).with_name("interpreted_adamw.py"), timeout_seconds=600, marks="nightly")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_planned_step_reads_and_writes_once(precision: str):
    """Weights and moments twice, gradients once; copies and gradients of 2 bytes for products, without a cast."""
    plan = plan_run(tiny_recipe(precision=precision), 1)
    found = []
    for fused in (True, False):
        number, num_bytes = Counter[str](), Counter[str]()
        for kind, amount in plan_step(plan, 0, 16, fused=fused).totals.work.items():
            number[kind.name] += amount.number
            num_bytes[kind.name] += amount.num_bytes
        found.append((number, num_bytes))
    (ours, moved), (_, moved_by_torch) = found
    assert (ours["_fused_adamw_rounded"], ours["adamw_corrections"]) == (1, 1)
    assert not any(ours[name] for name in ("_fused_adamw_", "_foreach_mul_", "_foreach_add_", "_foreach_sub_"))
    parameters = moved_by_torch["_foreach_mul_"] // 8 - 1  # clipping reads and writes each, and counts its factor
    # Torch's step has a cast of the weights, and one of their gradients in each layer.
    rounded = (moved_by_torch["_foreach_copy_"] - moved["_foreach_copy_"]) // 12
    assert (rounded > 0) == (precision == "bf16")
    assert moved["_fused_adamw_rounded"] == 28 * parameters  # a copy adds the 2 bytes that its gradient saves
    assert moved_by_torch["_foreach_norm"] - moved["_foreach_norm"] == 2 * rounded
    assert not ours["_foreach_copy_"]


def test_a_note_says_who_steps(assumed):
    trained = TrainedParameters({"weight": nn.Parameter(torch.ones(3))})
    optimizer = build_optimizer(AdamW(), trained)
    assert optimizer.notes(CUDA) == ["one kernel clips gradients, steps adamw and rounds the weights of the next step"]
    assert optimizer.notes(torch.device("cpu")) == []
    with planned_traits(None):
        (note,) = build_optimizer(AdamW(), trained).notes(CUDA)
    assert note == (
        "torch steps adamw, and not the fused kernel, because the device is a cpu, and the kernel needs an NVIDIA GPU"
    )


class _Reader(OptimizerUpdate):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize(
    ("sections", "weight", "reason"),
    [
        ({"parallel": {"strategy": "zero2"}}, torch.ones(2, 2), "DeepSpeed steps flattened weights"),
        ({}, torch.ones(2, 2).bfloat16(), "layer is stored in bfloat16, not in fp32"),
        ({}, torch.ones(2, 3).t(), "layer is not contiguous"),
        ({}, torch.ones(2, 2), None),
    ],
)
def test_other_parameters_are_stepped_by_torch(assumed, sections: dict[str, Any], weight: torch.Tensor, reason: str):
    trained = TrainedParameters({"layer": nn.Parameter(weight)}, recipe=tiny_recipe(**sections))
    optimizer = build_optimizer(AdamW(), trained)
    assert optimizer._by_kernel == reason or (reason is None and optimizer.scales_gradients)
    assert (kept_copy(trained.named["layer"]) is None) == (reason is not None)


def test_an_update_that_reads_gradients_gets_clipped_ones():
    optimizer = build_optimizer(AdamW(), trained := TrainedParameters({"layer": nn.Parameter(torch.ones(2))}))
    assert obstacle(optimizer, trained) is None
    optimizer.__class__ = type("AdamW", (_Reader, type(optimizer)), {})
    assert obstacle(optimizer, trained) == "the update _Reader reads the clipped gradients"


def test_addresses_are_found_once():
    """A step sends the addresses of gradients and the rates only, until a checkpoint or a change brings new memory."""
    parameters = [nn.Parameter(torch.ones(3000)), nn.Parameter(torch.ones(2))]
    trained = TrainedParameters({str(number): parameter for number, parameter in enumerate(parameters)}, {"1"})
    optimizer = build_optimizer(AdamW(learning_rate=0.5, weight_decay=0.1), trained)
    update = AdamWUpdate(optimizer, trained)
    calls: list[tuple[Any, ...]] = []

    def step(rate: float) -> tuple[Any, ...]:
        optimizer.begin(rate, 0)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        with (
            mock.patch.object(operations, "find_corrections"),
            mock.patch.object(operations, "update", side_effect=lambda *found: calls.append(found)),
        ):
            update.step(None, None)
        return calls[-1]

    words, _, table, owners, *_ = step(0.25)
    assert words[:2].tolist() == [parameter.grad.data_ptr() for parameter in parameters]
    assert words[2:6].tolist() == [0] * 4  # no copies, and gradients in fp32
    assert words[6:].view(torch.float64).tolist() == [0.25, 0.25]
    assert table[0].tolist() == [parameter.data_ptr() for parameter in parameters]
    assert table[3].tolist() == [3000, 2]
    assert owners.tolist() == [0] * -(-3000 // operations.TILE) + [1]
    assert table[6].tolist() == [0, len(owners) - 1]
    assert step(0.125)[2] is table
    optimizer.state[parameters[0]] = {key: value.clone() for key, value in optimizer.state[parameters[0]].items()}
    loaded = step(0.125)[2]
    assert loaded is not table
    assert loaded[1][0] == optimizer.state[parameters[0]]["exp_avg"].data_ptr()
    copy = kept_copy(parameters[1])
    assert copy is not None
    copy.tensor, copy.version = torch.ones(2, dtype=torch.bfloat16), parameters[1]._version
    words, _, new, *_ = step(0.125)
    assert new is not loaded
    assert words[2:4].tolist() == [0, copy.tensor.data_ptr()]
    assert copy.is_current(parameters[1])
