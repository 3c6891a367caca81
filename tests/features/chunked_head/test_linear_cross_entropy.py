"""The cross entropy of a linear layer in blocks of the vocabulary, against `F.cross_entropy` of the whole logits."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.benchmarks.loss import BLOCKS, WHOLE, peaks
from tests.helpers.ranks import RankPools
from trainer.features.chunked_head.linear_cross_entropy import LinearLayer, linear_cross_entropy
from trainer.parallel.groups import Group
from trainer.parallel.microbatch import IGNORED_LABEL
from trainer.parallel.placement import Split
from trainer.parallel.shards.slices import join_parts, part_of
from trainer.parallel.tensor.cross_entropy import VocabularyCut

ROWS, HIDDEN = 21, 6


def drawn(*shape: int, scale: float = 1.0, seed: int = 4) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def labels_of(vocabulary: int) -> Tensor:
    labels = torch.randint(vocabulary, (ROWS,), generator=torch.Generator().manual_seed(5))
    labels[:4] = torch.tensor([0, vocabulary - 1, IGNORED_LABEL, IGNORED_LABEL])
    return labels


def compare(
    vocabulary: int, num_columns: int, group: Group = None, dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> None:
    """Compare losses, right rows and gradients of this rank with those of the whole layer in fp64."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if group else (0, 1)
    split, labels = Split(0, "tp"), labels_of(vocabulary)
    x, weight, bias = (
        tensor.to(dtype)
        for tensor in (drawn(ROWS, HIDDEN, scale=scale), drawn(vocabulary, HIDDEN, seed=6), drawn(vocabulary, seed=7))
    )
    exact = [tensor.double().clone().requires_grad_() for tensor in (x, weight, bias)]
    logits = F.linear(*exact)
    expected = F.cross_entropy(logits, labels, reduction="none")
    slopes = drawn(ROWS, seed=8)
    expected.backward(slopes)

    own = [x.clone(), *(part_of(tensor, split, rank, size).clone() for tensor in (weight, bias))]
    x, *layer = (tensor.requires_grad_() for tensor in own)
    losses, _ = linear_cross_entropy(x, LinearLayer(*layer), labels, VocabularyCut(group, vocabulary), num_columns)
    assert losses.dtype == torch.promote_types(dtype, torch.float32)
    losses.backward(slopes.to(losses.dtype))
    if group:
        dist.all_reduce(x.grad)  # as `f` does
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 0.05) * scale
    torch.testing.assert_close(losses.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(x.grad.double(), exact[0].grad, rtol=tolerance, atol=tolerance)
    for part, whole in zip(layer, exact[1:], strict=True):
        assert part.grad.dtype == dtype
        parts = [torch.empty_like(part) for _ in range(size)]
        if group:
            dist.all_gather(parts, part.grad)
        else:
            parts = [part.grad]
        found = join_parts(parts, split, vocabulary)
        torch.testing.assert_close(found.double(), whole.grad, rtol=tolerance, atol=tolerance)
        assert sum(each.count_nonzero() for each in parts) == found.count_nonzero()  # padding has none


def compare_best(group: Group = None) -> None:
    """Small integers have equal logits, the largest ones among them: the first of equal ones is the prediction."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if group else (0, 1)
    for vocabulary in (1, 5, 13):
        x, weight = (tensor.clamp(-1, 1).round() for tensor in (drawn(ROWS, 2), drawn(vocabulary, 2, seed=6)))
        best, labels = F.linear(x, weight).argmax(-1), labels_of(vocabulary)
        labels[5::2] = best[5::2]
        layer = LinearLayer(part_of(weight, Split(0, "tp"), rank, size), None)
        _, right = linear_cross_entropy(x, layer, labels, VocabularyCut(group, vocabulary), 3, finds_best=True)
        assert right.bool().equal(best == labels)


@pytest.mark.parametrize("num_columns", [1, 5, 100])
@pytest.mark.parametrize("vocabulary", [1, 13, 16])
def test_blocks_are_the_whole_logits(vocabulary: int, num_columns: int):
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        compare(vocabulary, num_columns, dtype=dtype)
    compare(vocabulary, num_columns, dtype=torch.float64, scale=200.0)  # certain, right and wrong
    compare_best()


def compare_on_ranks() -> None:
    compare_best(dist.group.WORLD)
    for vocabulary in (13, 16, 5):  # 5 on 4 ranks: one has no column
        for num_columns in (1, 3, 100):
            compare(vocabulary, num_columns, dist.group.WORLD, torch.float64)
        compare(vocabulary, 2, dist.group.WORLD, torch.bfloat16)


@pytest.mark.parametrize("degree", [2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_ranks_share_the_vocabulary(ranks: RankPools, degree: int):
    ranks(degree).run(compare_on_ranks)


def test_a_certain_row_loses_no_digits():
    x, weight = torch.tensor([[30.0]]), torch.tensor([[1.0], [0.0]])
    loss, _ = linear_cross_entropy(x, LinearLayer(weight, None), torch.tensor([0]), VocabularyCut(None, 2), 1)
    assert loss.item() == pytest.approx(9.357623e-14, rel=1e-5)  # log(1 + exp(-30)); F.cross_entropy gives 0


@pytest.mark.parametrize("label", [13, -1])
def test_a_label_outside_of_the_vocabulary_is_refused(label: int):
    labels, weight = torch.full((2,), label), torch.randn(13, HIDDEN)
    with pytest.raises((RuntimeError, IndexError), match=r"out of bounds|out of range"):
        linear_cross_entropy(torch.randn(2, HIDDEN), LinearLayer(weight, None), labels, VocabularyCut(None, 13), 4)


@pytest.mark.parametrize("trained", [True, False])
def test_the_loss_takes_less_than_a_tenth_of_the_memory_of_whole_logits(trained: bool):
    """The peaks are counted at full size, on tensors without values; gradients, the result, do not count."""
    found = peaks(tokens=4096, vocabulary=128_256, hidden=4096, trained=trained, bf16=True)
    blocks, gradients = found[BLOCKS]
    assert found[WHOLE][0] > 6 * 2**30  # without gradients: they are there after the logits
    assert blocks - gradients < found[WHOLE][0] / 10


def test_the_head_in_blocks_adds_rows_in_fp32():
    torch.manual_seed(0)
    weight, bias = torch.randn(5, 4, requires_grad=True), torch.zeros(5, requires_grad=True)
    x, labels = torch.randn(1, 4).half(), torch.tensor([3])
    found = []
    for number in (1, 256):
        rows = x.repeat(number, 1)
        losses, _ = linear_cross_entropy(
            rows, LinearLayer(weight, bias), labels.repeat(number), VocabularyCut(None, 5), 2
        )
        found.append(torch.autograd.grad(losses.sum() * 2.0**13, (weight, bias)))
    for one, many in zip(*found, strict=True):
        torch.testing.assert_close(many, one * 256, rtol=1e-3, atol=0.1)
    assert found[1][0].abs().max() > 2**17
