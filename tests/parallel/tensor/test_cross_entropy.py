"""The vocabulary-parallel cross entropy against `F.cross_entropy` of the whole logits."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.ranks import RankPools
from trainer.parallel.placement import Split
from trainer.parallel.shards.slices import join_parts, part_of
from trainer.parallel.tensor.cross_entropy import vocab_parallel_argmax, vocab_parallel_cross_entropy

DEGREES = pytest.mark.parametrize("degree", [2, pytest.param(3, marks=pytest.mark.slow), 4])


def whole_logits(*shape: int, scale: float = 3.0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(4)) * scale).to(dtype)


def some_labels(vocab: int, *shape: int) -> Tensor:
    labels = torch.randint(vocab, shape, generator=torch.Generator().manual_seed(5))
    labels.view(-1)[:2] = torch.tensor([0, vocab - 1])
    return labels


def my_part(logits: Tensor, garbage: float = 77.0) -> Tensor:
    """This rank's columns; padded ones hold garbage, which must not be looked at."""
    rank, size, vocab = dist.get_rank(), dist.get_world_size(), logits.shape[-1]
    part = part_of(logits, Split(-1, "tp"), rank, size)
    padded = max(0, min(part.shape[-1], (rank + 1) * part.shape[-1] - vocab))
    part[..., part.shape[-1] - padded :] = garbage
    return part.requires_grad_()


def compare(logits: Tensor, labels: Tensor, rtol: float | None = None, atol: float | None = None) -> None:
    """Compare with torch's loss and gradient in fp64."""
    group, vocab = dist.group.WORLD, logits.shape[-1]
    whole = logits.detach().clone().requires_grad_()
    part = my_part(logits)
    expected = F.cross_entropy(whole.double().flatten(0, -2), labels.flatten(), reduction="none").view(labels.shape)
    found = vocab_parallel_cross_entropy(part, labels, group, vocab, reduction="none")
    assert found.dtype == torch.promote_types(logits.dtype, torch.float32)
    torch.testing.assert_close(found, expected.to(found.dtype), rtol=rtol, atol=atol)
    total = vocab_parallel_cross_entropy(part, labels, group, vocab)
    torch.testing.assert_close(total, expected.sum().to(total.dtype), rtol=rtol, atol=atol)
    slope = torch.randn(labels.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    expected.backward(slope)
    found.backward(slope.to(found.dtype))
    assert part.grad.dtype == logits.dtype
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.grad)
    torch.testing.assert_close(join_parts(parts, Split(-1, "tp"), vocab), whole.grad, rtol=rtol, atol=atol)
    assert sum(each.count_nonzero() for each in parts) == join_parts(parts, Split(-1, "tp"), vocab).count_nonzero()


def compare_all() -> None:
    for vocab in (13, 16, 5):  # 5 on 4 ranks: one has no column
        labels = some_labels(vocab, 3, 7)
        compare(whole_logits(3, 7, vocab), labels)
        compare(whole_logits(3, 7, vocab, dtype=torch.float64), labels)
        compare(whole_logits(21, vocab), labels.flatten().masked_fill(torch.arange(21) % 3 == 0, -100))
        compare(whole_logits(3, 7, vocab), torch.full((3, 7), -100))
        compare(whole_logits(0, vocab), labels.flatten()[:0])
    for dtype in (torch.bfloat16, torch.float16):
        eps = torch.finfo(dtype).eps
        compare(whole_logits(3, 7, 13, dtype=dtype), some_labels(13, 3, 7), rtol=eps, atol=eps**2)
    for sign in (1.0, -1.0):
        large = whole_logits(3, 7, 13) + sign * 1e4
        large[0, 0] *= 3.0
        compare(large, some_labels(13, 3, 7))


@DEGREES
def test_losses_and_gradients_equal_the_whole_logits(ranks: RankPools, degree):
    ranks(degree).run(compare_all)


def compare_with_bert() -> None:
    labels = some_labels(30522, 2, 8)
    labels[:, 1::3] = -100
    compare(whole_logits(2, 8, 30522), labels)


@pytest.mark.parametrize("degree", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_a_vocabulary_of_30522(ranks: RankPools, degree):
    assert 30522 % degree
    ranks(degree).run(compare_with_bert)


def all_ignored() -> list[float]:
    part = my_part(whole_logits(4, 9))
    loss = vocab_parallel_cross_entropy(part, torch.full((4,), -100), dist.group.WORLD, 9)
    loss.backward()
    return [loss.item(), part.grad.abs().sum().item()]


def test_rows_that_are_all_ignored_give_zero(ranks: RankPools):
    assert ranks(2).run(all_ignored) == [[0.0, 0.0]] * 2


def own_gradient() -> None:
    """By finite differences in this rank's own columns: the other ranks' stand still while it moves its own."""
    logits = whole_logits(2, 5, dtype=torch.float64)
    labels = torch.tensor([4, 1])
    part = my_part(logits)
    slope = torch.tensor([0.7, -1.3], dtype=torch.float64)

    def loss(moved: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(moved, labels, dist.group.WORLD, 5, "none") @ slope

    (found,) = torch.autograd.grad(loss(part), part)
    with torch.no_grad():
        for mover in range(dist.get_world_size()):
            for index in range(part.numel()):
                step = torch.zeros_like(part)
                step.view(-1)[index] = 1e-6 * (dist.get_rank() == mover)
                difference = (loss(part + step) - loss(part - step)) / 2e-6
                if dist.get_rank() == mover:
                    torch.testing.assert_close(found.view(-1)[index], difference, rtol=1e-6, atol=1e-8)


def test_the_gradient_in_fp64_by_finite_differences(ranks: RankPools):
    ranks(2).run(own_gradient)


def communications() -> tuple[list[str], list[str]]:
    part = my_part(whole_logits(2, 9))
    called: list[str] = []
    original = dist.all_reduce

    def counting(tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, group: object = None) -> object:
        called.append(f"{str(op).rpartition('.')[-1]} {tuple(tensor.shape)} {tensor.dtype}")
        return original(tensor, op, group)

    with patch.object(dist, "all_reduce", counting):
        loss = vocab_parallel_cross_entropy(part, torch.tensor([1, 2]), dist.group.WORLD, 9)
        forward = called.copy()
        loss.backward()
    return forward, called[len(forward) :]


def test_two_all_reduces_forward_and_none_backward(ranks: RankPools):
    expected = ["MAX (2,) torch.float32", "SUM (2, 2) torch.float32"]
    assert ranks(2).run(communications) == [(expected, [])] * 2


def what_is_saved() -> list[tuple[tuple[int, ...], torch.dtype]]:
    part = my_part(whole_logits(4, 9, dtype=torch.bfloat16))
    saved = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append((tuple(tensor.shape), tensor.dtype))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        vocab_parallel_cross_entropy(part, torch.arange(4), dist.group.WORLD, 9)
    return saved


def test_only_the_logits_and_three_numbers_a_row_are_saved(ranks: RankPools):
    rows = [((4,), torch.int64), ((4,), torch.float32), ((4,), torch.float32)]
    assert ranks(2).run(what_is_saved) == [[((4, 5), torch.bfloat16), *rows]] * 2


def refusals() -> None:
    group = dist.group.WORLD
    with pytest.raises(AssertionError, match="gathered logits"):
        vocab_parallel_cross_entropy(whole_logits(2, 9), torch.tensor([1, 2]), group, 9)
    for label in (9, 12, -1):
        with pytest.raises(RuntimeError, match="out of bounds"):
            vocab_parallel_cross_entropy(my_part(whole_logits(2, 9)), torch.tensor([1, label]), group, 9)
        dist.barrier()


def test_gathered_logits_and_unknown_labels_are_refused_on_every_rank(ranks: RankPools):
    ranks(4).run(refusals)


def fp32_is_needed() -> tuple[float, float]:
    """The loss of bf16 logits, against that of a softmax in bf16."""
    logits = whole_logits(16, 12, dtype=torch.bfloat16)
    labels = some_labels(12, 16)
    exact = F.cross_entropy(logits.double(), labels, reduction="sum").item()
    ours = vocab_parallel_cross_entropy(my_part(logits), labels, dist.group.WORLD, 12).item()
    return abs(ours / exact - 1), abs(F.cross_entropy(logits, labels, reduction="sum").item() / exact - 1)


def test_low_precision_logits_are_computed_in_fp32(ranks: RankPools):
    ours, low = ranks(2).run(fp32_is_needed)[0]
    assert ours < 1e-6 < 1e-4 < low


class TestOneRank:
    @pytest.mark.parametrize("reduction", ["none", "sum"])
    def test_is_torchs_to_the_last_bit(self, reduction):
        assert not dist.is_initialized()  # so nothing can be communicated
        labels = some_labels(9, 2, 5)
        labels[0, 3] = -100
        ours, torchs = (whole_logits(2, 5, 9).requires_grad_() for _ in range(2))
        found = vocab_parallel_cross_entropy(ours, labels, None, 9, reduction=reduction)
        expected = F.cross_entropy(torchs.flatten(0, 1), labels.flatten(), reduction=reduction)
        assert found.shape == (labels.shape if reduction == "none" else ())
        assert torch.equal(found.flatten(), expected.flatten())
        found.sum().backward()
        expected.sum().backward()
        assert torch.equal(ours.grad, torchs.grad)

    def test_is_in_fp32_and_its_gradient_in_the_type_of_the_logits(self):
        logits = whole_logits(2, 9, dtype=torch.bfloat16).requires_grad_()
        loss = vocab_parallel_cross_entropy(logits, torch.tensor([1, -100], dtype=torch.int32), None, 9)
        loss.backward()
        assert (loss.dtype, logits.grad.dtype) == (torch.float32, torch.bfloat16)


class TestArgmax:
    """The best column of a vocabulary that is cut."""

    @DEGREES
    @pytest.mark.parametrize("vocab", [13, 5])
    def test_equals_the_whole_logits(self, ranks: RankPools, degree, vocab):
        """13 and 5 leave padded columns; of 5 on four ranks, the last one has nothing else."""
        logits = whole_logits(3, 7, vocab)
        expected = logits.argmax(-1)
        assert expected.unique().numel() > 2
        for found in ranks(degree).run(argmax_of_parts, logits):
            assert torch.equal(found, expected)

    def test_of_equal_logits_is_the_first(self, ranks: RankPools):
        logits = torch.zeros(2, 8, dtype=torch.bfloat16)
        logits[1, 3:] = 1.0
        assert [found.tolist() for found in ranks(2).run(argmax_of_parts, logits)] == [[0, 3]] * 2

    def test_without_a_group(self):
        logits = whole_logits(3, 7)
        assert torch.equal(vocab_parallel_argmax(logits, None, 7), logits.argmax(-1))


def argmax_of_parts(logits: Tensor) -> Tensor:
    return vocab_parallel_argmax(my_part(logits.clone()), dist.group.WORLD, logits.shape[-1])
