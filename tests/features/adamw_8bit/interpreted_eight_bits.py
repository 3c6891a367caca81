"""The kernels of 8-bit moments in Triton's interpreter against the eager functions; `test_eight_bits.py` runs it.

Triton chooses its interpreter when it is imported, so these tests need a process of their own:

    TRITON_INTERPRET=1 python -m pytest tests/features/adamw_8bit/interpreted_eight_bits.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import triton  # noqa: F401  # the kernels run where it is imported as an interpreter
from torch import Tensor, nn

from tests.features.adamw_8bit.test_eight_bits import CPU, PLACEMENTS, part, ranks_of
from tests.gpu.test_eight_bits_gpu import assert_codes_of_a_cpu, gradients, own_maxima, stepped
from trainer.engine.optimizers.parameters import TrainedParameters
from trainer.engine.optimizers.table import build_optimizer
from trainer.features.adamw_8bit import optimizer as eight_bits
from trainer.features.adamw_8bit.dynamic_map import FIRST, SECOND
from trainer.features.adamw_8bit.optimizer import SCALES, STEP
from trainer.features.adamw_8bit.section import AdamW8bit
from trainer.parallel import kernel_support
from trainer.parallel.placement import ParameterPlacement

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NaN and overflow

WHOLE = PLACEMENTS["whole"]


def test_the_interpreter_is_on():
    assert kernel_support.obstacle(CPU) is None


def root_(tensor: Tensor) -> Tensor:
    """Replace a tensor by its square root, rounded as IEEE 754; torch's root on CPUs may be the next number."""
    return tensor.copy_(torch.from_numpy(np.sqrt(tensor.numpy())))


def as_eager(
    gradients: Sequence[Tensor],
    placement: ParameterPlacement = WHOLE,
    mesh: Any = None,
    flags: Sequence[float] = (),
) -> dict[str, Tensor]:
    """Return weight and state from the kernels, which are those of the eager functions bit for bit."""
    weight = torch.linspace(-1, 1, gradients[0].numel()).view_as(gradients[0])
    if not gradients[0].is_contiguous():
        weight = weight.t().contiguous().t()
    with mock.patch.object(eight_bits, "code_index", side_effect=AssertionError("not fused")):
        found = stepped(weight, gradients, placement, mesh, flags)
    with (
        mock.patch.object(kernel_support, "obstacle", return_value="the test wants the eager function"),
        mock.patch.object(Tensor, "sqrt_", root_),
    ):
        expected = stepped(weight, gradients, placement, mesh, flags)
    assert found.keys() == expected.keys() == {"weight", STEP, FIRST, SECOND, SCALES}
    for key, tensor in found.items():
        assert torch.equal(tensor, expected[key]), key
    return found


@pytest.mark.parametrize("shape", [(64, 64), (70, 64), (4099,)])
def test_a_whole_parameter(shape: tuple[int, ...]):
    found = as_eager(gradients(shape), ParameterPlacement("", shape))
    assert found[STEP] == 3
    assert len(found[FIRST].unique()) > 100
    assert found[SCALES].all()


@pytest.mark.parametrize("name", [name for name in PLACEMENTS if name != "whole"])
def test_a_part(name: str):
    """The maxima of other ranks are left out."""
    placement = PLACEMENTS[name]
    for mesh in ranks_of(3, 2)[1:4]:
        mesh.max_ = own_maxima
        as_eager([part(gradient, placement, mesh) for gradient in gradients(placement.shape)], placement, mesh)


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_bad_step_changes_nothing(is_shared: bool):
    placement, mesh = (PLACEMENTS["shards"], ranks_of(1, 3)[1]) if is_shared else (WHOLE, None)
    if is_shared:
        mesh.max_ = own_maxima
    first, second, third = (part(one, placement, mesh) if mesh else one for one in gradients(placement.shape))
    bad = torch.full_like(first, torch.nan)
    found = as_eager([bad, first, second, bad, third], placement, mesh, [1.0, 0.0, 0.0, 1.0, 0.0])
    good = as_eager([first, second, third], placement, mesh)
    assert all(torch.equal(found[key], good[key]) for key in good)


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-18, 1e25])
def test_zeros_and_extreme_gradients(scale: float):
    found = as_eager(gradients(WHOLE.shape, scale))
    assert found[SCALES].isfinite().all()
    assert bool(found[SCALES].any()) == (scale > 0)


def test_a_matrix_that_is_not_contiguous():
    shape = (64, 70)
    as_eager([gradient.t() for gradient in gradients((70, 64))], ParameterPlacement("", shape))


def test_without_elements_there_is_nothing_to_do():
    placement, mesh = ParameterPlacement("", (1, 5000), PLACEMENTS["shards"].splits), ranks_of(1, 2)[1]
    mesh.max_ = own_maxima
    as_eager([torch.zeros(0, 5000)] * 2, placement, mesh)


def test_the_addresses_of_many_parameters():
    """Learning rates and maxima are rows of larger tensors."""
    parameters = [nn.Parameter(torch.full((64, 64), float(number))) for number in range(3)]
    recipe = AdamW8bit(name="adamw_8bit", learning_rate=0.01)
    optimizer = build_optimizer(recipe, TrainedParameters({str(number): one for number, one in enumerate(parameters)}))
    for last in (3, 2, 1):
        for number, parameter in enumerate(parameters):
            parameter.grad = torch.ones(64, 64) if number < last else None
        optimizer.step()
    changes = [float((number - parameter.detach()).mean()) for number, parameter in enumerate(parameters)]
    assert changes == pytest.approx([0.03, 0.02, 0.01], rel=1e-3)


def test_the_test_on_a_gpu_runs():
    for name in ("whole", "q, k and v"):
        assert_codes_of_a_cpu(name, CPU)
