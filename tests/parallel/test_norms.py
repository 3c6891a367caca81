"""The global norm and clipping, against torch's own on the whole model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.helpers.ranks import RankPools
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.norms import clip_factor, global_grad_norm, multiply_gradients_
from trainer.parallel.placement import ParameterPlacement, Split

CPU = torch.device("cpu")
SPLIT = ParameterPlacement("split", (4, 6), (Split(0, "tp"),))
WHOLE = ParameterPlacement("whole", (3,))
EMBEDDING = (30522, 768)


def parameters(*gradients: torch.Tensor | None) -> list[nn.Parameter]:
    made = []
    for gradient in gradients:
        parameter = nn.Parameter(torch.zeros_like(gradient) if gradient is not None else torch.zeros(2))
        parameter.grad = gradient
        made.append(parameter)
    return made


def placed(made: list[nn.Parameter]) -> list[tuple[nn.Parameter, ParameterPlacement]]:
    return [(parameter, ParameterPlacement(str(i), tuple(parameter.shape))) for i, parameter in enumerate(made)]


def random_gradients(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in ((4, 6), (3,), (), (2, 1, 5))]


class TestNorm:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_is_torchs(self, dtype):
        made = parameters(*random_gradients(dtype))
        norm = global_grad_norm(placed(made), ParallelMesh(CPU))
        torch.testing.assert_close(norm, nn.utils.get_total_norm([p.grad for p in made]).double())
        assert norm.shape == ()

    def test_parameters_without_a_gradient_count_as_zero(self):
        with_none = parameters(torch.tensor([3.0, 4.0]), None)
        assert global_grad_norm(placed(with_none), ParallelMesh(CPU)).item() == 5.0
        assert global_grad_norm(placed(parameters(None)), ParallelMesh(CPU)).item() == 0.0

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
    def test_is_fp64(self, dtype):
        assert (
            global_grad_norm(placed(parameters(torch.ones(2, dtype=dtype))), ParallelMesh(CPU)).dtype == torch.float64
        )

    def test_gradients_in_bf16_have_the_norm_of_their_copies_in_fp32(self):
        generator = torch.Generator().manual_seed(0)
        gradients = [torch.randn(300, 70, generator=generator).bfloat16() for _ in range(4)]
        mixed = [gradient if number % 2 else gradient.float() for number, gradient in enumerate(gradients)]
        norms = [
            global_grad_norm(placed(parameters(*some)), ParallelMesh(CPU))
            for some in (gradients, mixed, [gradient.float() for gradient in gradients])
        ]
        assert norms[0] == norms[1] == norms[2]

    @pytest.mark.parametrize("is_contiguous", [True, False])
    def test_of_an_embedding_of_bert(self, is_contiguous):
        """torch's own norm of so many fp32 numbers is wrong by 1e-3 on a CPU."""
        gradient = torch.randn(EMBEDDING, generator=torch.Generator().manual_seed(0))
        expected = torch.linalg.vector_norm(gradient, dtype=torch.float64).item()
        gradient = gradient if is_contiguous else gradient.t().contiguous().t()
        norm = global_grad_norm(placed(parameters(gradient)), ParallelMesh(CPU)).item()
        assert norm == pytest.approx(expected, rel=1e-6)

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_a_non_finite_gradient_shows_in_the_norm(self, value):
        assert not global_grad_norm(placed(parameters(torch.tensor([1.0, value]))), ParallelMesh(CPU)).isfinite()


def norm_of_split_and_whole() -> float:
    """Each of two tensor ranks holds half of a [4, 6] gradient, and all of a [3] one."""
    mesh = ParallelMesh(CPU, tp=2)
    split, whole, *_ = random_gradients()
    made = parameters(split.chunk(2)[mesh.index("tp")].contiguous(), whole)
    return global_grad_norm(zip(made, (SPLIT, WHOLE), strict=True), mesh).item()


def test_split_parameters_are_summed_and_whole_ones_counted_once(ranks: RankPools):
    expected = nn.utils.get_total_norm(random_gradients()[:2]).item()
    assert ranks(2).run(norm_of_split_and_whole) == pytest.approx([expected] * 2, rel=1e-6)


class TestClipping:
    @pytest.mark.parametrize("max_norm", [0.1, 1.0, 1000.0])
    def test_is_torchs(self, max_norm):
        ours, torchs = parameters(*random_gradients(), None), parameters(*random_gradients(), None)
        norm = global_grad_norm(placed(ours), ParallelMesh(CPU))
        multiply_gradients_(ours, clip_factor(norm, max_norm))
        nn.utils.clip_grad_norm_(torchs, max_norm)
        for one, other in zip(ours, torchs, strict=True):
            torch.testing.assert_close(one.grad, other.grad)

    def test_the_norm_afterwards_is_the_greatest_allowed(self):
        made = parameters(*random_gradients())
        norm = global_grad_norm(placed(made), ParallelMesh(CPU))
        assert norm > 0.5
        multiply_gradients_(made, clip_factor(norm, 0.5))
        assert global_grad_norm(placed(made), ParallelMesh(CPU)).item() == pytest.approx(0.5, rel=1e-5)

    def test_small_gradients_are_left_alone(self):
        assert clip_factor(torch.zeros(()), 1.0) == clip_factor(torch.ones(()), 1.0) == 1.0
