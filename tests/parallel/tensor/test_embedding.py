"""The embeddings that are cut, by vocabulary or by features, against `nn.Embedding`."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.helpers.ranks import RankPools
from trainer.base.errors import UsageError
from trainer.parallel.communication import copy_to_group
from trainer.parallel.groups import index_in_group
from trainer.parallel.placement import Split
from trainer.parallel.shards.slices import part_of
from trainer.parallel.tensor.cross_entropy import vocab_parallel_cross_entropy
from trainer.parallel.tensor.embedding import FeatureParallelEmbedding, VocabParallelEmbedding

HIDDEN = 6
DEGREES = pytest.mark.parametrize("degree", [2, pytest.param(3, marks=pytest.mark.slow), 4])


def whole_embedding(vocab: int, padding_idx: int | None = None) -> nn.Embedding:
    torch.manual_seed(7)
    embedding = nn.Embedding(vocab, HIDDEN, padding_idx)
    nn.init.normal_(embedding.weight)  # the padding row too, as in a loaded checkpoint
    return embedding


def held(whole: Tensor) -> Tensor:
    return part_of(whole, Split(0, "tp"), dist.get_rank(), dist.get_world_size())


def some_ids(vocab: int, *shape: int) -> Tensor:
    ids = torch.randint(vocab, shape, generator=torch.Generator().manual_seed(2))
    ids.view(-1)[:3] = torch.tensor([0, vocab - 1, 0])
    return ids


def compare(vocab: int, padding_idx: int | None, length: int = 7) -> None:
    whole = whole_embedding(vocab, padding_idx)
    part = VocabParallelEmbedding(whole, dist.group.WORLD)
    assert (part.num_embeddings, part.embedding_dim, part.padding_idx) == (vocab, HIDDEN, whole.padding_idx)
    assert part.weight.shape == (-(-vocab // dist.get_world_size()), HIDDEN)
    assert part.placements("e.")["e.weight"].num_elements({"cp_tp": dist.get_world_size()}) == part.weight.numel()
    ids, slope = some_ids(vocab, 3, length), torch.randn(3, length, HIDDEN)
    expected, found = whole(ids), part(ids)
    assert torch.equal(found, expected)
    expected.backward(slope)
    found.backward(slope)
    torch.testing.assert_close(part.weight.grad, held(whole.weight.grad))
    if padding_idx is not None:
        assert not whole.weight.grad[padding_idx].any()


def compare_all() -> None:
    for padding_idx in (None, 0, 6, -1):
        compare(13, padding_idx)
    compare(5, 1, length=3)  # on 4 ranks, one that has no id
    compare(30522, 0)


@DEGREES
def test_vectors_and_gradients_equal_the_whole_table(ranks: RankPools, degree):
    ranks(degree).run(compare_all)


@pytest.mark.slow
def test_a_vocabulary_of_30522_on_eight_ranks(ranks: RankPools):
    ranks(8).run(compare, 30522, 0)


def ids_of_one_rank_only() -> tuple[bool, bool]:
    """All ids are rank 0's, and their slopes are not finite: nothing of it may reach another's row 0."""
    part = VocabParallelEmbedding(whole_embedding(8), dist.group.WORLD)
    part(torch.tensor([[1, 2]])).backward(torch.full((1, 2, HIDDEN), torch.inf))
    return part.weight.grad[0].any().item(), part.weight.grad[1].isinf().any().item()


def test_ids_that_are_elsewhere_give_no_gradient(ranks: RankPools):
    assert ranks(2).run(ids_of_one_rank_only) == [(False, True), (False, False)]


def unknown_ids() -> None:
    """9 ids on 4 ranks: 9, 10 and 11 would be padding."""
    part = VocabParallelEmbedding(whole_embedding(9), dist.group.WORLD)
    for id_ in (9, 11, 12, -1):
        with pytest.raises(IndexError):
            part(torch.tensor([[0, id_]]))


def test_ids_outside_of_the_vocabulary_are_refused_on_every_rank(ranks: RankPools):
    ranks(4).run(unknown_ids)


def tied_decoder(vocab: int) -> None:
    """The weight is used twice; the gradients of both uses add up."""
    whole = whole_embedding(vocab, padding_idx=1)
    part = VocabParallelEmbedding(copy.deepcopy(whole), dist.group.WORLD)
    ids, labels = some_ids(vocab, 2, 5), some_ids(vocab, 2, 5).flip(0)
    expected = nn.functional.cross_entropy((whole(ids).tanh() @ whole.weight.T).flatten(0, 1), labels.flatten())
    logits = copy_to_group(part(ids).tanh(), dist.group.WORLD) @ part.weight.T
    found = vocab_parallel_cross_entropy(logits, labels, dist.group.WORLD, vocab) / labels.numel()
    torch.testing.assert_close(found, expected)
    expected.backward()
    found.backward()
    torch.testing.assert_close(part.weight.grad, held(whole.weight.grad))
    decoder_only = torch.autograd.grad(
        nn.functional.cross_entropy((whole(ids).detach().tanh() @ whole.weight.T).flatten(0, 1), labels.flatten()),
        whole.weight,
    )[0]
    assert not torch.allclose(whole.weight.grad, decoder_only, atol=1e-4)
    rows = vocab - index_in_group(dist.group.WORLD) * len(part.weight)
    assert not part.weight.grad[max(rows, 0) :].any()  # padding


@DEGREES
def test_a_tied_decoder_adds_both_gradients(ranks: RankPools, degree):
    ranks(degree).run(tied_decoder, 13)


class TestOneRank:
    @pytest.mark.parametrize("padding_idx", [None, 3, -1])
    def test_is_the_plain_embedding_to_the_last_bit(self, padding_idx):
        assert not dist.is_initialized()  # so nothing can be communicated
        whole = whole_embedding(13, padding_idx)
        part = VocabParallelEmbedding(whole, None)
        ids = some_ids(13, 3, 7)
        for each in (whole, part):
            (each(ids) * 3.0).sum().backward()
        assert torch.equal(part(ids), whole(ids))
        assert torch.equal(part.weight.grad, whole.weight.grad)
        assert part.weight.data_ptr() != whole.weight.data_ptr()

    def test_where_the_weight_lies(self):
        part = VocabParallelEmbedding(nn.Embedding(13, HIDDEN, -2, device="meta", dtype=torch.bfloat16), None)
        assert (part.padding_idx, part.weight.dtype, part.weight.device.type) == (11, torch.bfloat16, "meta")
        placement = part.placements()["weight"]
        assert (placement.shape, placement.splits) == ((13, HIDDEN), (Split(0, "cp_tp"),))
        assert placement.partial_over == ("dp",)

    def test_unsupported_features_are_refused(self):
        class Scaled(nn.Embedding):
            def forward(self, ids: Tensor) -> Tensor:
                return super().forward(ids) * 2

        with pytest.raises(UsageError, match="max_norm and sparse cannot be cut"):
            VocabParallelEmbedding(nn.Embedding(4, 2, max_norm=1.0, sparse=True), None)
        with pytest.raises(UsageError, match="the forward of Scaled"):
            VocabParallelEmbedding(Scaled(4, 2), None)


def cut_by_features(features: int) -> None:
    whole = nn.Embedding(5, features, padding_idx=2)
    nn.init.normal_(whole.weight, generator=torch.Generator().manual_seed(7))
    part = FeatureParallelEmbedding(whole, dist.group.WORLD)
    split = Split(1, "tp")
    placement = part.placements("bias.")["bias.weight"]
    assert (placement.shape, placement.splits, placement.partial_over) == ((5, features), (split,), ("dp",))
    ids = some_ids(5, 3, 4)
    for each in (whole, part):
        each(ids).square().sum().backward()
    rank, size = dist.get_rank(), dist.get_world_size()
    assert torch.equal(part(ids), whole(ids).chunk(size, -1)[rank])
    assert torch.equal(part.weight.grad, part_of(whole.weight.grad, split, rank, size))


class TestFeatures:
    def test_a_rank_gives_its_share_of_every_vector(self, ranks: RankPools):
        ranks(2).run(cut_by_features, 4)

    def test_unsupported_features_are_refused(self):
        with pytest.raises(UsageError, match="max_norm cannot be cut"):
            FeatureParallelEmbedding(nn.Embedding(4, 2, max_norm=1.0), None)
