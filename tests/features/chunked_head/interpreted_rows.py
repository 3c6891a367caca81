"""The kernel of losses over a vocabulary in Triton's interpreter against torch; `test_fused_rows.py` runs it.

Triton chooses its interpreter when it is imported, so these tests need a process of their own:

    TRITON_INTERPRET=1 python -m pytest tests/features/chunked_head/interpreted_rows.py
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.interpreting import round_as_gpus
from trainer.features.chunked_head import fused_rows, rows
from trainer.features.chunked_head.linear_cross_entropy import LinearLayer, Passes, linear_cross_entropy
from trainer.parallel import kernel_support
from trainer.parallel.microbatch import IGNORED_LABEL
from trainer.parallel.tensor.cross_entropy import VocabularyCut

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NaN and overflow

ROWS = 9
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDTHS = (1, 2, 17, 1000, 8192, 8193, 30_522)


def test_the_interpreter_is_on():
    assert kernel_support.obstacle(torch.device("cpu")) is None


@pytest.fixture(autouse=True)
def rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    round_as_gpus(monkeypatch)


def drawn(width: int, dtype: torch.dtype = torch.float32, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(width)
    labels = torch.randint(width, (ROWS,), generator=generator)
    labels[:3] = torch.tensor([0, width - 1, IGNORED_LABEL])
    return (torch.randn((ROWS, width), generator=generator) * scale).to(dtype), labels


def by_torch(logits: Tensor, labels: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """Return the losses and the gradient of torch's function, in fp64."""
    exact = logits.double().requires_grad_()
    losses = F.cross_entropy(exact, labels, reduction="none")
    losses.backward(gradients.double())
    return losses.detach(), exact.grad


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_losses_and_gradients_are_those_of_torch(width: int, dtype: torch.dtype):
    logits, labels = drawn(width, dtype)
    cut, gradients = VocabularyCut(None, width), torch.linspace(-1, 3, ROWS)
    expected = by_torch(logits, labels, gradients)
    found = logits.clone()
    with mock.patch.object(rows, "_statistics", None), mock.patch.object(rows, "_write_gradients_", None):
        losses, statistics = rows.losses_of(logits, labels, cut)
        rows.write_gradients_(found, labels, statistics, gradients, cut)
        at_once = logits.clone()
        assert rows.losses_and_gradients_(at_once, labels, cut).equal(losses)
    scale = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(losses.double(), expected[0], rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(found.double(), expected[1], rtol=scale, atol=scale)
    torch.testing.assert_close(at_once * gradients[:, None].to(dtype), found, rtol=2 * scale, atol=2 * scale)
    assert not found[2].any()


def test_large_logits_and_certain_rows():
    logits = torch.tensor([[3e4, 0.0, -3e4], [30.0, 0.0, -200.0], [-200.0, 0.0, 30.0], [7e37, 7e37, 7e37]])
    labels = torch.tensor([1, 0, 0, 2])
    losses, _ = rows.losses_of(logits, labels, VocabularyCut(None, 3))
    torch.testing.assert_close(losses, F.cross_entropy(logits.double(), labels, reduction="none").float())


def test_the_parts_of_two_ranks():
    """Each has its columns, the second one padding; their statistics are merged as by the collectives."""
    whole, labels = drawn(17)
    gradients = torch.linspace(-1, 3, ROWS)
    losses, expected = by_torch(whole, labels, gradients)
    parts = [whole[:, :9].contiguous(), F.pad(whole[:, 9:], (0, 1), value=99.0)]
    numbers = [(9, 0, 17), (8, 9, 17)]
    found = [fused_rows.statistics(part, labels, *own) for part, own in zip(parts, numbers, strict=True)]
    by_operations = [rows._statistics(part, labels, *own) for part, own in zip(parts, numbers, strict=True)]
    maximum = torch.maximum(found[0][0], found[1][0])
    sums, at_label = (
        sum(one[place] * ((one[0] - maximum).exp() if place == 1 else 1.0) for one in found) for place in (1, 2)
    )
    statistics = torch.stack([maximum, sums, at_label])
    own = F.softplus(rows._distance(statistics)).masked_fill(labels == IGNORED_LABEL, 0.0)
    torch.testing.assert_close(own.double(), losses, rtol=1e-6, atol=1e-6)
    for part, one, other in zip(numbers, found, by_operations, strict=True):
        torch.testing.assert_close(one[2], other[2], msg=str(part))
    for part, own_numbers in zip(parts, numbers, strict=True):
        fused_rows.write_gradients(part, labels, statistics, gradients, *own_numbers)
    torch.testing.assert_close(torch.cat([parts[0], parts[1][:, :8]], 1).double(), expected, rtol=1e-6, atol=1e-6)
    assert not parts[1][:, 8].any()


@pytest.mark.parametrize("label", [17, -1])
def test_a_label_outside_of_the_vocabulary_has_no_loss(label: int):
    logits, labels = drawn(17)
    labels[4] = label
    losses, _ = rows.losses_of(logits, labels, VocabularyCut(None, 17))
    assert losses.isnan().nonzero().tolist() == [[4]]


def test_numbers_that_are_not_finite_reach_the_loss():
    logits, labels = drawn(17)
    logits[4, 5], logits[5, 6], logits[6, 7] = torch.nan, torch.inf, -torch.inf
    losses, _ = rows.losses_of(logits, labels, VocabularyCut(None, 17))
    assert not losses[4].isfinite()
    assert not losses[5].isfinite()
    assert losses[6].isfinite()


@pytest.mark.parametrize("passes", [Passes(9), Passes(4), Passes(4, sums=True)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_computes_as_by_operations_of_torch(dtype: torch.dtype, passes: Passes):
    generator = torch.Generator().manual_seed(0)
    layer = [torch.randn(shape, generator=generator).to(dtype) for shape in ((ROWS, 6), (37, 6), (37,))]
    labels, found = drawn(37)[1], []
    for kernel in (True, False):
        leaves = [one.clone().requires_grad_() for one in layer]
        with mock.patch.object(rows, "_kernel", rows._kernel if kernel else lambda _: None):
            cut = VocabularyCut(None, 37)
            losses = linear_cross_entropy(leaves[0], LinearLayer(*leaves[1:]), labels, cut, passes)
            (losses.sum() * 8).backward()
        found.append([losses.detach(), *(leaf.grad for leaf in leaves)])
    scale = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    for ours, torchs in zip(*found, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=scale, atol=scale * 8)


def test_torch_sees_the_operations():
    logits, labels = drawn(17)
    numbers = (17, 0, 17)
    statistics = fused_rows.statistics(logits, labels, *numbers)
    operations = {
        torch.ops.trainer.row_statistics.default: (logits, labels, *numbers),
        torch.ops.trainer.write_row_gradients.default: (logits.clone(), labels, statistics, None, *numbers),
        torch.ops.trainer.row_losses_and_gradients.default: (logits.clone(), labels, *numbers),
    }
    for operation, arguments in operations.items():
        torch.library.opcheck(operation, arguments, test_utils=("test_schema", "test_faketensor"))


def test_a_second_backward_pass_is_an_error():
    logits, labels = drawn(17)
    x, weight = logits[:, :6].clone().requires_grad_(), logits.new_ones(17, 6).requires_grad_()
    cut = VocabularyCut(None, 17)
    for passes in (Passes(9), Passes(4, sums=True)):
        loss = linear_cross_entropy(x, LinearLayer(weight, None), labels, cut, passes).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
