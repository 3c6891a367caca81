"""The dropout kernel in Triton's interpreter against the eager function; `test_fused_dropout.py` runs it.

Triton chooses its interpreter when it is imported, so these tests need a process of their own:

    TRITON_INTERPRET=1 python -m pytest tests/features/kernels/interpreted_dropout.py
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.gpu.test_dropout_gpu import CASES, DTYPES, as_eager, drop, eager, fused, not_finite, random, speeds
from tests.helpers.interpreting import round_as_gpus
from trainer.features.kernels import fused_dropout
from trainer.parallel import kernel_support
from trainer.parallel.dropout import DropoutKeys, DropoutSite, KeyedDropout, MicrobatchKey
from trainer.parallel.random import row_keys

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NaN and overflow

CPU = torch.device("cpu")
KEY = MicrobatchKey(0, torch.tensor([5, 3]))


def test_the_interpreter_is_on():
    assert kernel_support.obstacle(CPU) is None


@pytest.fixture(autouse=True)
def rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    round_as_gpus(monkeypatch)


@pytest.mark.parametrize("name", CASES)
def test_is_the_eager_function(name: str):
    shape, site = CASES[name]
    output = as_eager(random(shape, CPU), **site)
    if output.numel() > 40:
        assert 0.1 < (output == 0).float().mean() < 0.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [1e-9, 0.1, 0.99999])
def test_in_each_type(dtype: torch.dtype, p: float):
    as_eager(random((2, 3, 64), CPU, dtype), p)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_are_not_finite(dtype: torch.dtype):
    """A dropped NaN or infinity is NaN, so that a run notices it."""
    output = as_eager(not_finite(dtype, CPU))
    assert output.isnan().sum() > output[:, 0].isnan().sum()


def test_tensors_that_are_not_contiguous():
    as_eager(random((3, 2, 20), CPU).transpose(0, 1))
    as_eager(random((2, 3, 40), CPU)[..., ::2])
    as_eager(random((2, 3, 40), CPU)[:, 0])
    as_eager(random((2, 3, 1), CPU).expand(2, 3, 20))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("of_residual", DTYPES)
def test_with_a_residual(dtype: torch.dtype, of_residual: torch.dtype):
    shape = (2, 3, 35)
    as_eager(random(shape, CPU, dtype), 0.3, random(shape, CPU, of_residual, 2), cut_dim=-1, part=1)


def test_a_residual_that_is_not_contiguous():
    as_eager(random((2, 3, 20), CPU), 0.3, random((3, 2, 20), CPU).transpose(0, 1))


@pytest.mark.parametrize("num_rows", [0, 1, 32])
def test_the_keys_of_rows(num_rows: int):
    whole = torch.randint(-(2**63), 2**63 - 1, (26, 1), generator=torch.Generator().manual_seed(0))
    rows = torch.arange(num_rows) * 2**33 + 5
    expected = row_keys(whole, torch.cat([rows, torch.zeros(1, dtype=torch.int64)]))
    assert torch.equal(fused_dropout.row_keys(whole, rows), expected)


def test_it_draws_for_each_call_step_and_row_anew():
    keys = DropoutKeys(1)
    outputs = []
    for step, rows in ((0, [0, 1]), (0, [1, 2]), (1, [0, 1])):
        with fused(), keys.use(MicrobatchKey(step, torch.tensor(rows))):
            outputs += [DropoutSite(keys, "site").drop(torch.ones(2, 1, 64), 0.5) for _ in range(2)]
    assert torch.equal(outputs[0][1], outputs[2][0])
    pairs = ((0, 1), (0, 2), (0, 4))
    assert not any(torch.equal(outputs[one], outputs[other]) for one, other in pairs)


def test_a_recomputation_draws_the_same_mask():
    keys, x = DropoutKeys(1), random((2, 3, 20), CPU).requires_grad_()
    dropout, grads = KeyedDropout(DropoutSite(keys, "site"), 0.5), []
    for recompute in (False, True):
        with fused(), keys.use(KEY):
            contexts = lambda: (nullcontext(), keys.capture()())  # noqa: E731
            y = checkpoint(dropout, x, use_reentrant=False, context_fn=contexts) if recompute else dropout(x)
        with keys.use(MicrobatchKey(0, KEY.rows + 2)):
            grads.append(torch.autograd.grad(y.square().sum(), x)[0])
    assert torch.equal(*grads)


def test_second_derivatives():
    x = random((2, 3, 20), CPU).requires_grad_()
    found = []
    for how in (fused, eager):
        with how():
            (gradient,) = torch.autograd.grad(drop(x).pow(3).sum(), x, create_graph=True)
            found.append(torch.autograd.grad(gradient.square().sum(), x)[0])
    assert torch.equal(*found)
    assert found[0].any()


def test_nothing_but_keys_is_saved():
    x, saved = random((2, 3, 20), CPU).requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        drop(x)
    assert [(tensor.dtype, tensor.numel()) for tensor in saved] == [(torch.int64, 2)]


def test_torch_sees_one_operation():
    """Its schema, shapes and strides are right."""
    x, keys = random((2, 3, 20), CPU), torch.tensor([1, 2])
    arguments = (keys, None, None, [0, 0, 0], 0.3, torch.float32, None)
    operation = torch.ops.trainer.keyed_dropout.default
    torch.library.opcheck(operation, (x, *arguments), test_utils=("test_schema", "test_faketensor"))


def test_the_measurements_on_a_gpu_run():
    assert set(speeds((2, 3, 20), CPU, lambda step: step() and 1.0).values()) == {1.0}
