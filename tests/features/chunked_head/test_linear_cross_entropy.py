"""The cross entropy of a linear layer without logits in fp32, against `F.cross_entropy` of the whole logits."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.benchmarks.loss import CHUNKS, HEAD, PLAIN, counts
from tests.helpers.ranks import RankPools
from trainer.features.chunked_head.linear_cross_entropy import LinearLayer, Passes, linear_cross_entropy
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
    vocabulary: int,
    passes: Passes,
    group: Group = None,
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
    trained: tuple[bool, bool] = (True, True),
) -> None:
    """Compare losses and gradients of this rank with those of the whole layer in fp64."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if group else (0, 1)
    split, labels = Split(0, "tp"), labels_of(vocabulary)
    x, weight, bias = (
        tensor.to(dtype)
        for tensor in (drawn(ROWS, HIDDEN, scale=scale), drawn(vocabulary, HIDDEN, seed=6), drawn(vocabulary, seed=7))
    )
    exact = [tensor.double().clone().requires_grad_() for tensor in (x, weight, bias)]
    logits = F.linear(*exact)
    expected = F.cross_entropy(logits, labels, reduction="none")
    slopes = torch.full((ROWS,), 0.37, dtype=torch.float64) if passes.sums else drawn(ROWS, seed=8)
    expected.backward(slopes)

    own = [x.clone(), *(part_of(tensor, split, rank, size).clone() for tensor in (weight, bias))]
    x, *layer = (tensor.requires_grad_(one) for tensor, one in zip(own, (True, *trained), strict=True))
    losses = linear_cross_entropy(x, LinearLayer(*layer), labels, VocabularyCut(group, vocabulary), passes)
    assert losses.dtype == torch.promote_types(dtype, torch.float32)
    losses.backward(slopes.to(losses.dtype), retain_graph=passes.keeps)
    if passes.keeps:
        first = x.grad.clone()
        losses.backward(slopes.to(losses.dtype))
        assert x.grad.equal(first * 2)
        x.grad.copy_(first)
        for part in layer:
            if part.requires_grad:
                part.grad /= 2
    if group:
        dist.all_reduce(x.grad)  # as `f` does
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 0.05) * scale
    torch.testing.assert_close(losses.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(x.grad.double(), exact[0].grad, rtol=tolerance, atol=tolerance)
    for part, whole in zip(layer, exact[1:], strict=True):
        if not part.requires_grad:
            continue
        assert part.grad.dtype == dtype
        parts = [torch.empty_like(part) for _ in range(size)]
        if group:
            dist.all_gather(parts, part.grad)
        else:
            parts = [part.grad]
        found = join_parts(parts, split, vocabulary)
        torch.testing.assert_close(found.double(), whole.grad, rtol=tolerance, atol=tolerance)
        assert sum(each.count_nonzero() for each in parts) == found.count_nonzero()  # padding has none


WAYS = {
    "whole": Passes(100),
    "whole, of a sum": Passes(100, sums=True),
    "whole, run twice": Passes(100, keeps=True),
    "chunks, of a sum": Passes(5, sums=True),
    "chunks of one row, of a sum": Passes(1, sums=True),
    "chunks": Passes(5),
    "chunks, run twice": Passes(8, keeps=True),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("vocabulary", [1, 13, 16])
def test_losses_and_gradients_are_those_of_whole_logits(vocabulary: int, way: str):
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        compare(vocabulary, WAYS[way], dtype=dtype)
    compare(vocabulary, WAYS[way], dtype=torch.float64, scale=200.0)  # certain, right and wrong
    for trained in ((False, False), (True, False), (False, True)):
        compare(vocabulary, WAYS[way], dtype=torch.float64, trained=trained)


@pytest.mark.parametrize("passes", [Passes(64), Passes(10, sums=True)])
def test_fp32_losses_and_gradients_of_a_real_vocabulary(passes: Passes):
    """Within 1e-6 of torch's, relative to the largest number, as its own rounding."""
    vocabulary, rows = 30_522, 33
    x, weight = drawn(rows, 64).float(), drawn(vocabulary, 64, scale=0.2, seed=6).float()
    labels = torch.randint(vocabulary, (rows,), generator=torch.Generator().manual_seed(5))
    labels[3] = IGNORED_LABEL
    found = []
    for ours in (True, False):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, weight)]
        if ours:
            cut = VocabularyCut(None, vocabulary)
            losses = linear_cross_entropy(leaves[0], LinearLayer(leaves[1], None), labels, cut, passes)
        else:
            losses = F.cross_entropy(F.linear(*leaves), labels, reduction="none")
        found.append([losses, *torch.autograd.grad(losses.sum() / rows, leaves)])
    for ours, plain in zip(*found, strict=True):
        assert (ours - plain).abs().max() <= 1e-6 * plain.abs().max()


def compare_on_ranks() -> None:
    for vocabulary in (13, 16, 5):  # 5 on 4 ranks: one has no column
        for passes in WAYS.values():
            compare(vocabulary, passes, dist.group.WORLD, torch.float64)
        compare(vocabulary, WAYS["chunks, of a sum"], dist.group.WORLD, torch.bfloat16)


@pytest.mark.parametrize("degree", [2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_ranks_share_the_vocabulary(ranks: RankPools, degree: int):
    ranks(degree).run(compare_on_ranks)


def test_a_certain_row_loses_no_digits():
    x, weight = torch.tensor([[30.0]]), torch.tensor([[1.0], [0.0]])
    loss = linear_cross_entropy(x, LinearLayer(weight, None), torch.tensor([0]), VocabularyCut(None, 2), Passes(1))
    assert loss.item() == pytest.approx(9.357623e-14, rel=1e-5)  # log(1 + exp(-30)); F.cross_entropy gives 0


@pytest.mark.parametrize("label", [13, -1])
def test_a_label_outside_of_the_vocabulary_is_refused(label: int):
    labels, weight = torch.full((2,), label), torch.randn(13, HIDDEN)
    with pytest.raises((RuntimeError, IndexError), match=r"out of bounds|out of range"):
        linear_cross_entropy(
            torch.randn(2, HIDDEN), LinearLayer(weight, None), labels, VocabularyCut(None, 13), Passes(4)
        )


def test_the_head_moves_few_bytes_and_computes_three_products():
    """Counted at the size of Llama 1B, on tensors without values, with the operations of a GPU."""
    tokens, vocabulary, hidden = 4096, 128_256, 2048
    found = counts(tokens, vocabulary, hidden, trained=True, bf16=True)
    logits, weight = 2 * tokens * vocabulary, 2 * vocabulary * hidden
    # Logits: written, read for the loss, read and written for the gradient, read by two products. Weight: read twice,
    # cast before, and its gradient written in bf16 and cast to fp32.
    assert found[HEAD].num_bytes < 1.02 * (6 * logits + (2 + 3 + 4) * weight)
    assert found[HEAD].num_bytes < 0.4 * found[PLAIN].num_bytes
    assert found[HEAD].flops == found[CHUNKS].flops == found[PLAIN].flops == 3 * 2 * tokens * vocabulary * hidden
    assert found[HEAD].peak_bytes < 0.45 * found[PLAIN].peak_bytes


@pytest.mark.parametrize("passes", [Passes(256), Passes(100, sums=True)])
def test_the_head_adds_rows_of_fp16_in_fp32(passes: Passes):
    torch.manual_seed(0)
    weight, bias = torch.randn(5, 4, requires_grad=True), torch.zeros(5, requires_grad=True)
    x, labels = torch.randn(1, 4).half(), torch.tensor([3])
    found = []
    for number in (1, 256):
        rows = x.repeat(number, 1)
        losses = linear_cross_entropy(
            rows, LinearLayer(weight, bias), labels.repeat(number), VocabularyCut(None, 5), passes
        )
        found.append(torch.autograd.grad(losses.sum() * 2.0**13, (weight, bias)))
    for one, many in zip(*found, strict=True):
        torch.testing.assert_close(many, one * 256, rtol=1e-3, atol=0.1)
    assert found[1][0].abs().max() > 2**17
