"""Masks in Inductor's Triton code, run by Triton's interpreter, against the eager function; `test_compiled_masks.py`.

Triton chooses its interpreter when it is imported, so these tests need a process of their own:

    TRITON_INTERPRET=1 python -m pytest tests/features/kernels/interpreted_masks.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.helpers.inductor_code import interpreted, written_for_gpu
from trainer.models import compiled
from trainer.parallel.dropout import DropoutKeys, DropoutSite

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numbers that wrap


@pytest.fixture(autouse=True)
def without_earlier_graphs() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def test_dropout_is_fused_with_residual_and_norm_and_draws_the_masks_of_the_eager_function():
    random = torch.Generator().manual_seed(0)
    site = DropoutSite(DropoutKeys(1), "site", cut_dim=2, part=1)  # its first word belongs to another rank in part
    keys = torch.randint(-(2**63), 2**63 - 1, (3,), generator=random)
    x = torch.randn(3, 5, 22, generator=random).bfloat16().requires_grad_()
    residual, weight = (torch.randn(shape, generator=random).requires_grad_() for shape in ((3, 5, 22), (22,)))

    def layer(x: Tensor, residual: Tensor, weight: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        return F.layer_norm(site.drop(x, 0.3, keys, residual), (22,), weight), site.mask(x.shape, 0.3, keys)

    def results(layer: Callable[..., tuple[Tensor, Tensor]]) -> list[Tensor]:
        output, mask = layer(x, residual, weight, keys)
        return [mask.bool(), output, *torch.autograd.grad(output.square().sum(), (x, residual, weight))]

    expected = results(layer)
    with written_for_gpu(run=interpreted) as written:
        found = results(torch.compile(layer, fullgraph=True, dynamic=True, backend=compiled.BACKEND))
    forward, backward = written.graphs
    assert len(forward.kernels) == 1
    assert forward.others == backward.others == []
    assert torch.equal(found[0], expected[0])
    # The fused kernel does not round the scaled activations to bf16: they differ by one unit in the last place.
    for one, other in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(one, other, rtol=2**-7, atol=2**-7 * float(other.abs().max()))
