"""The kernels of 8-bit moments on a GPU: the codes of a CPU, no memory and no wait of the host.

The functions take a device, so that the interpreter can try them. `make gpu` measures the time of an update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.features.adamw_8bit.test_eight_bits import CPU, PLACEMENTS, part, ranks_of
from trainer.engine.optimizers.parameters import TrainedParameters
from trainer.engine.optimizers.table import build_optimizer
from trainer.engine.optimizers.whole_access import WholeAccess
from trainer.features.adamw_8bit.dynamic_map import FIRST, SECOND
from trainer.features.adamw_8bit.optimizer import SCALES
from trainer.features.adamw_8bit.section import AdamW8bit
from trainer.parallel.placement import ParameterPlacement

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

GPU = torch.device("cuda", 0)


def gradients(shape: Sequence[int], scale: float = 1.0) -> list[Tensor]:
    """Return the gradients of three steps. Sizes differ by element; the third step has rows of zeros."""
    generator = torch.Generator().manual_seed(0)
    found = [torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator).pow(4) for _ in range(3)]
    found[2][: shape[0] // 2] = 0
    return [gradient * scale for gradient in found]


def stepped(
    weight: Tensor,
    gradients: Sequence[Tensor],
    placement: ParameterPlacement,
    mesh: Any = None,
    flags: Sequence[float] = (),
) -> dict[str, Tensor]:
    """Return weight and state after a step for each gradient; no flag: all steps are good."""
    parameter = nn.Parameter(weight.clone())
    recipe = AdamW8bit(name="adamw_8bit", learning_rate=0.01, weight_decay=0.1)
    access = WholeAccess({parameter: placement}, mesh)
    optimizer = build_optimizer(recipe, TrainedParameters({"weight": parameter}, whole=access))
    for step, gradient in enumerate(gradients):
        if flags:
            optimizer.found_inf = torch.tensor(flags[step], device=weight.device)
        parameter.grad = gradient.to(weight.device)
        optimizer.step()
    return {"weight": parameter.detach(), **optimizer.state[parameter]}


def own_maxima(maxima: Tensor, axis: str) -> Tensor:
    """Return the maxima of one rank, in the place of a collective."""
    return maxima


def assert_codes_of_a_cpu(name: str, device: torch.device, scale: float = 1.0) -> None:
    """Compare codes and scales bit for bit. Weights depend on a square root, which CPUs may round otherwise."""
    placement, mesh = PLACEMENTS[name], None
    steps = gradients(placement.shape, scale)
    if placement.splits:
        mesh = ranks_of(3, 2)[1]
        mesh.max_ = own_maxima
        steps = [part(gradient, placement, mesh) for gradient in steps]
    weight = torch.linspace(-1, 1, steps[0].numel()).view_as(steps[0])
    found, expected = (stepped(weight.to(where), steps, placement, mesh) for where in (device, CPU))
    for key in (FIRST, SECOND, SCALES):
        assert torch.equal(found[key].cpu(), expected[key]), key
    torch.testing.assert_close(found["weight"].cpu(), expected["weight"], rtol=0, atol=4e-7)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_codes_equal_the_cpu(name: str):
    assert_codes_of_a_cpu(name, GPU)


@pytest.mark.parametrize("scale", [1e-18, 1e-30, 1e25])
def test_and_of_extreme_gradients(scale: float):
    assert_codes_of_a_cpu("whole", GPU, scale)


def test_a_bad_step_changes_nothing():
    placement = PLACEMENTS["whole"]
    first, second, third = gradients(placement.shape)
    bad, weight = torch.full_like(first, torch.nan), torch.ones(placement.shape, device=GPU)
    found = stepped(weight, [bad, first, second, bad, third], placement, None, [1.0, 0.0, 0.0, 1.0, 0.0])
    expected = stepped(weight, [first, second, third], placement)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_an_update_needs_no_memory_and_the_host_does_not_wait():
    parameter = nn.Parameter(torch.ones(8192, 8192, device=GPU))
    optimizer = build_optimizer(AdamW8bit(name="adamw_8bit"), TrainedParameters({"weight": parameter}))
    parameter.grad = torch.ones_like(parameter)
    optimizer.found_inf = torch.zeros((), device=GPU)
    optimizer.step()  # makes the state
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 2**16
