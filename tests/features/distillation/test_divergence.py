"""The vocabulary-parallel divergence against `F.kl_div` of the whole logits."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.ranks import RankPools
from trainer.features.distillation.divergence import vocab_parallel_divergence
from trainer.parallel.placement import Split
from trainer.parallel.shards.slices import join_parts, part_of

SHAPE = (3, 4)


def some_logits(seed: int, vocab: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(*SHAPE, vocab, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def expected(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    student, teacher = student.double() / temperature, teacher.double() / temperature
    return F.kl_div(student.log_softmax(-1), teacher.log_softmax(-1), reduction="none", log_target=True).sum(-1)


def some_grad() -> Tensor:
    return torch.rand(SHAPE, generator=torch.Generator().manual_seed(3))


def padded_part(whole: Tensor, garbage: float) -> Tensor:
    """This rank's columns; padded ones hold garbage, which must not be looked at."""
    rank, size, vocab = dist.get_rank(), dist.get_world_size(), whole.shape[-1]
    part = part_of(whole, Split(-1, "tp"), rank, size)
    padded = max(0, min(part.shape[-1], (rank + 1) * part.shape[-1] - vocab))
    part[..., part.shape[-1] - padded :] = garbage
    return part


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_it_is_that_of_torch(temperature: float, dtype: torch.dtype):
    student, teacher = some_logits(1, 11, dtype).requires_grad_(), some_logits(2, 11, dtype)
    reference = student.detach().double().requires_grad_()
    found = vocab_parallel_divergence(student, teacher, None, 11, temperature)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected(reference, teacher, temperature), rtol=1e-5, atol=1e-5)
    found.backward(some_grad())
    expected(reference, teacher, temperature).backward(some_grad().double())
    assert student.grad is not None
    assert student.grad.dtype == dtype
    torch.testing.assert_close(student.grad, reference.grad, check_dtype=False, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_equal_logits_have_no_divergence_and_no_gradient():
    student = some_logits(1, 7).requires_grad_()
    found = vocab_parallel_divergence(student, student, None, 7, 2.0)
    found.sum().backward()
    assert student.grad is not None
    assert found.abs().max() < 1e-6
    assert student.grad.abs().max() < 1e-6


def cut(vocab: int) -> tuple[Tensor, Tensor]:
    """Return the divergences of this rank and the joined gradient."""
    student, teacher = padded_part(some_logits(1, vocab), 77.0).requires_grad_(), padded_part(some_logits(2, vocab), 99)
    found = vocab_parallel_divergence(student, teacher, dist.group.WORLD, vocab, 2.0)
    found.backward(some_grad())
    assert student.grad is not None
    parts = [torch.empty_like(student.grad) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, student.grad)
    return found.detach(), join_parts(parts, Split(-1, "tp"), vocab)


@pytest.mark.parametrize("degree", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("vocab", [12, 11, 5])  # 5 columns on 4 ranks: the last rank has padded columns only
def test_a_cut_vocabulary_changes_nothing(ranks: RankPools, degree: int, vocab: int):
    student, teacher = some_logits(1, vocab).double().requires_grad_(), some_logits(2, vocab)
    whole = expected(student, teacher, 2.0)
    whole.backward(some_grad().double())
    assert student.grad is not None
    for divergences, gradient in ranks(degree).run(cut, vocab):
        torch.testing.assert_close(divergences.double(), whole.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gradient.double(), student.grad, rtol=1e-5, atol=1e-6)
