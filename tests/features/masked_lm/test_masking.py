"""What is hidden is a function of seed, epoch, row and position; and as BERT has it."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from trainer.base.errors import UsageError
from trainer.features.masked_lm.masking import Masking
from trainer.parallel.microbatch import IGNORED_LABEL

MASK, SPECIAL, VOCABULARY = 4, 5, 1000  # ids below `SPECIAL` are special
ROWS, LENGTH = 512, 256


def masking_of(probability: float = 0.15, seed: int = 1) -> Masking:
    return Masking(seed, probability, MASK, torch.arange(SPECIAL), torch.arange(SPECIAL, VOCABULARY))


def ids_of(rows: int = ROWS, length: int = LENGTH, first: int = SPECIAL) -> Tensor:
    return torch.randint(first, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(0))


def hide(ids: Tensor, epoch: int | None = 0, rows: Tensor | None = None, **keys: float) -> tuple[Tensor, Tensor]:
    return masking_of(**keys)(ids, torch.arange(len(ids)) if rows is None else rows, epoch)


def assert_share(where: Tensor, probability: float) -> None:
    """Within five standard deviations of a binomial."""
    deviation = math.sqrt(probability * (1 - probability) / where.numel())
    assert abs(where.double().mean().item() - probability) < 5 * deviation


@pytest.mark.parametrize("probability", [0.02, 0.15, 0.6])
def test_the_shares_equal_bert(probability: float):
    ids = ids_of()
    hidden, labels = hide(ids, probability=probability)
    chosen = labels != IGNORED_LABEL
    assert torch.equal(labels[chosen], ids[chosen])
    assert torch.equal(hidden[~chosen], ids[~chosen])
    assert_share(chosen, probability)
    assert_share(hidden[chosen] == MASK, 0.8)
    others = chosen & (hidden != MASK)
    # one of the random tokens in a thousand is the true one
    assert_share(hidden[others] == ids[others], 0.5 + 0.5 / (VOCABULARY - SPECIAL))


def test_random_tokens_are_of_the_whole_vocabulary():
    ids = torch.full((ROWS, LENGTH), SPECIAL)
    hidden, labels = hide(ids, probability=0.9)
    drawn = hidden[(labels != IGNORED_LABEL) & (hidden != MASK) & (hidden != SPECIAL)]
    counts = torch.bincount(drawn, minlength=VOCABULARY)[SPECIAL + 1 :]
    expected = drawn.numel() / counts.numel()
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi_square - counts.numel()) < 5 * math.sqrt(2 * counts.numel())
    assert counts.min() > 0


def test_every_position_is_as_likely():
    _, labels = hide(ids_of())
    of_positions = (labels != IGNORED_LABEL).double().mean(0)
    assert (of_positions - 0.15).abs().max() < 5 * math.sqrt(0.15 * 0.85 / ROWS)


def test_special_tokens_are_neither_chosen_nor_put_in():
    ids = ids_of(first=0)
    hidden, labels = hide(ids, probability=0.9)
    special = ids < SPECIAL
    assert special.any()
    assert torch.equal(hidden[special], ids[special])
    assert (labels[special] == IGNORED_LABEL).all()
    assert set(hidden[~special & (hidden < SPECIAL)].tolist()) == {MASK}


def test_rows_positions_and_padding_are_as_in_the_whole():
    """Whatever microbatch, and whatever width, a row is in."""
    ids = ids_of(40, 30)
    hidden, labels = hide(ids)
    some = torch.tensor([7, 39, 0])
    padded = torch.cat([ids[some, :20], torch.zeros(3, 25, dtype=torch.int64)], dim=1)
    of_some, labels_of_some = hide(padded, rows=some)
    assert torch.equal(of_some[:, :20], hidden[some, :20])
    assert torch.equal(labels_of_some[:, :20], labels[some, :20])
    assert (labels_of_some[:, 20:] == IGNORED_LABEL).all()


def test_epochs_and_seeds_choose_anew_and_evaluations_do_not():
    ids = ids_of()
    chosen = {
        name: hide(ids, epoch, seed=seed)[1] != IGNORED_LABEL
        for name, epoch, seed in [("0", 0, 1), ("1", 1, 1), ("evaluation", None, 1), ("seed", 0, 2)]
    }
    for one in chosen:
        for other in chosen:
            both = chosen[one] & chosen[other]
            assert_share(both, 0.15 if one == other else 0.15**2)
    assert torch.equal(hide(ids, None)[0], hide(ids, None)[0])
    assert torch.equal(hide(ids, 3)[0], hide(ids, 3)[0])


def test_no_generator_is_asked():
    before = torch.get_rng_state()
    hide(ids_of(4, 8))
    assert torch.equal(torch.get_rng_state(), before)


def test_is_the_same_in_every_version():
    """A changed value breaks every checkpoint: the resumed half would hide other tokens."""
    hidden, labels = masking_of(0.5, seed=42)(torch.arange(100, 108).repeat(2, 1), torch.tensor([3, 2**40]), 7)
    assert hidden.tolist() == [[100, 4, 4, 103, 4, 105, 106, 4], [4, 4, 102, 103, 104, 105, 106, 107]]
    assert (labels[0] != IGNORED_LABEL).nonzero().flatten().tolist() == [0, 1, 2, 4, 7]
    assert (labels[1] != IGNORED_LABEL).nonzero().flatten().tolist() == [0, 1, 7]


def test_the_mask_token_of_a_tokenizer(tokenizer):
    masking = Masking.of(tokenizer, 0.15, seed=3)
    assert masking.mask_token == tokenizer.mask_token_id
    assert masking.special_tokens.tolist() == sorted(tokenizer.all_special_ids)
    assert tokenizer.pad_token_id in masking.special_tokens
    assert len(masking.ordinary_tokens) == len(tokenizer) - len(masking.special_tokens)


def test_a_tokenizer_without_a_mask_token_is_refused():
    tokenizer = SimpleNamespace(mask_token_id=None, name_or_path="gpt2")
    with pytest.raises(UsageError, match=r"`task.type` may be masked_lm only .* `gpt2` has none; .*`model.tokenizer`"):
        Masking.of(tokenizer, 0.15, seed=3)
