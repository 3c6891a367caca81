"""Whole words, spans, shares and falling rates, beside the papers' numbers and the collator of transformers."""

from __future__ import annotations

import math
import string
from dataclasses import replace

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from pydantic import ValidationError
from torch import Tensor

from trainer.base.errors import UsageError
from trainer.features.masked_lm.masking import Masking
from trainer.features.masked_lm.section import MaskedLM
from trainer.features.masked_lm.units import SPAN_LENGTHS, Spans, Words
from trainer.parallel.microbatch import IGNORED_LABEL

MASK, SPECIAL, VOCABULARY = 4, 5, 1000
INSIDE = 400  # ids from here on are inside of a word
BEGINS = torch.arange(VOCABULARY) < INSIDE
ROWS, LENGTH = 256, 200


def masking_of(units: type[Words], probability: float = 0.15, **keys: object) -> Masking:
    ordinary = torch.arange(SPECIAL, VOCABULARY)
    return Masking(1, probability, MASK, torch.arange(SPECIAL), ordinary, units=units(BEGINS), **keys)


def rows_of(rows: int = ROWS, length: int = LENGTH) -> Tensor:
    """Rows that begin with a special token, end with one, and hold one in the middle."""
    ids = torch.randint(SPECIAL, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(0))
    ids[:, 0], ids[:, length // 2], ids[:, -1] = 2, 3, 3
    return ids


def words_in(ids: Tensor) -> Tensor:
    """The number of the word of each token, by a plain loop."""
    numbers = torch.zeros_like(ids)
    for row, of_row in zip(numbers, ids.tolist(), strict=True):
        word, was_special = -1, True
        for place, token in enumerate(of_row):
            word += token < SPECIAL or was_special or token < INSIDE
            was_special = token < SPECIAL
            row[place] = word
    return numbers


@pytest.mark.parametrize("units", [Words, Spans])
@pytest.mark.parametrize("probability", [0.15, 0.3, 0.8])
def test_words_are_chosen_as_a_whole_at_the_rate(units: type[Words], probability: float):
    ids = rows_of()
    _, labels = masking_of(units, probability)(ids, torch.arange(ROWS), 0)
    chosen, special, words = labels != IGNORED_LABEL, ids < SPECIAL, words_in(ids)
    assert not chosen[special].any()
    for row in range(ROWS):
        of_row = words[row][chosen[row]]
        assert torch.isin(words[row], of_row).equal(chosen[row]), "a word is chosen in part"
    # a word has 2.5 tokens at the mean, so the share varies as that of fewer draws
    deviation = math.sqrt(probability * (1 - probability) / ids.numel()) * 3
    over = 1.0 if units is Words else 1.03  # the last word of a row's spans is whole
    assert probability - 5 * deviation < chosen[~special].double().mean() < probability * over + 5 * deviation


def test_spans_have_the_lengths_of_spanbert():
    """Geometric with p 0.2 from 1 to 10 words, at the mean 3.8 (Joshi et al. 2020, section 3.1)."""
    assert SPAN_LENGTHS @ np.arange(1, 11) == pytest.approx(3.8, abs=0.01)
    ids = torch.full((4000, 400), SPECIAL)  # each token is a word
    _, labels = masking_of(Spans, 0.03)(ids, torch.arange(len(ids)), 0)
    counts = np.zeros(30)
    for row in (labels != IGNORED_LABEL).numpy():
        bounds = np.flatnonzero(np.diff(np.concatenate([[0], row, [0]])))
        runs = bounds[1::2] - bounds[::2]
        # The last span of a row is cut, and two may touch: the shares differ by these few.
        np.add.at(counts, runs, 1)
    shares = counts[1:11] / counts.sum()
    expected = SPAN_LENGTHS
    assert counts[11:].sum() / counts.sum() < 0.05
    # ratios of neighbouring lengths, where cuts do not add
    assert shares[4:9] / shares[3:8] == pytest.approx(expected[4:9] / expected[3:8], abs=0.12)


def test_the_tokens_of_a_span_share_their_fate():
    """SpanBERT replaces whole spans; the words of `words` have tokens of each kind."""
    ids = rows_of()
    hidden, labels = masking_of(Spans)(ids, torch.arange(ROWS), 0)
    chosen, words = labels != IGNORED_LABEL, words_in(ids)
    for row in range(ROWS):
        for word in words[row][chosen[row]].unique():
            assert len((hidden[row][words[row] == word] == MASK).unique()) == 1
    hidden, labels = masking_of(Words)(ids, torch.arange(ROWS), 0)
    chosen = labels != IGNORED_LABEL
    assert (hidden[chosen] == MASK).double().mean() == pytest.approx(0.8, abs=0.02)


@pytest.mark.parametrize("units", [Words, Spans])
def test_rows_are_as_in_the_whole(units: type[Words]):
    ids, masking = rows_of(40), masking_of(units)
    hidden, labels = masking(ids, torch.arange(40), 3)
    some = torch.tensor([7, 39, 0])
    padded = torch.cat([ids[some], torch.zeros(3, 25, dtype=torch.int64)], dim=1)
    of_some, labels_of_some = masking(padded, some, 3)
    assert torch.equal(of_some[:, :LENGTH], hidden[some])
    assert torch.equal(labels_of_some[:, :LENGTH], labels[some])
    other, _ = masking(ids, torch.arange(40), 4)
    assert not torch.equal(other, hidden)


def test_shares():
    ids = rows_of()
    for shares in ([1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.5, 0.5, 0.0]):
        hidden, labels = masking_of(Words, shares=shares)(ids, torch.arange(ROWS), 0)
        chosen = labels != IGNORED_LABEL
        assert (hidden[chosen] == MASK).double().mean() == pytest.approx(shares[0], abs=0.02)
        same = ids[chosen] == hidden[chosen]
        assert same.double().mean() == pytest.approx(shares[2], abs=0.01)


@pytest.mark.parametrize("is_cosine", [False, True])
def test_the_rate_falls_with_the_step(is_cosine: bool):
    masking = replace(masking_of(Words, 0.3), units=None, last=0.15, is_cosine=is_cosine)
    rates = [masking.at(step, 101).probability for step in range(101)]
    assert (rates[0], rates[50], rates[100]) == pytest.approx((0.3, 0.225, 0.15))
    assert rates[25] == pytest.approx(0.15 + 0.15 * (0.5 * (1 + math.cos(math.pi / 4)) if is_cosine else 0.75))
    ids = rows_of()
    of_evaluation = masking(ids, torch.arange(ROWS), None)[1]
    assert ((of_evaluation != IGNORED_LABEL)[ids >= SPECIAL]).double().mean() == pytest.approx(0.15, abs=0.01)
    assert masking.at(7, 101)(ids, torch.arange(ROWS), None)[1].equal(of_evaluation)
    constant = masking_of(Words)
    assert constant.at(5, 10) is constant


TEXTS = ["the quick brown foxes were jumping over an uncommonly lazy dog", "words without any comma or stop"]


def piece_tokenizer(kind: str) -> transformers.PreTrainedTokenizerFast:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    if kind == "wordpiece":
        letters = [*string.ascii_lowercase, *(f"##{letter}" for letter in string.ascii_lowercase)]
        words = ["the", "fox", "##es", "jump", "##ing", "word", "with", "##out", "un", "##common", "##ly"]
        vocabulary = {token: number for number, token in enumerate([*special, *letters, *words])}
        model = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
        model.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    else:
        model = tokenizers.Tokenizer(tokenizers.models.BPE())
        model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        learner = tokenizers.trainers.BpeTrainer(
            vocab_size=300, special_tokens=special, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )  # fmt: skip
        model.train_from_iterator(TEXTS * 3, learner)
        model.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    roles = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, mask_token="[MASK]", **roles)


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_words_are_those_of_transformers(kind: str):
    tokenizer = piece_tokenizer(kind)
    words = Words.of(tokenizer)
    for text in TEXTS:
        encoded = tokenizer(text, return_offsets_mapping=True, return_special_tokens_mask=True)
        collator = transformers.DataCollatorForLanguageModeling
        offsets = np.array([encoded["offset_mapping"]])
        expected, _ = collator._calc_word_ids_and_prob_mask(offsets, np.array([encoded["special_tokens_mask"]]))
        ids = torch.tensor([encoded["input_ids"]])
        firsts = words.first_places(ids, torch.zeros_like(ids, dtype=torch.bool))
        assert firsts.unique(return_inverse=True)[1].tolist() == (expected - expected.min()).tolist()
        assert len(firsts.unique()) == len(text.split()) < ids.shape[1]


def test_a_tokenizer_without_marks_is_refused():
    vocabulary = {"[MASK]": 0, "a": 1, "##": 2}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=model, mask_token="[MASK]", unk_token="a")
    with pytest.raises(UsageError, match=r"`task.mask_units` .* no token with ##, Ġ or ▁; use tokens"):
        Masking.of(tokenizer, 0.15, 1, "spans")


def test_rules_of_the_keys():
    def problems(**keys: object) -> list[str]:
        section = MaskedLM(type="masked_lm", text="text", **keys)
        return [f"{'.'.join(map(str, one.keys[0]))} {one.text}" for one in section.contradictions()]

    assert problems(mask_shares=[1.0, 0.0, 0.0], mask_probability_end=0.1, mask_decay="cosine") == []
    assert problems(mask_shares=[0.8, 0.1, 0.2]) == [
        "task.mask_shares must sum to 1, but sums to 1.1; use [0.8, 0.1, 0.1] as BERT"
    ]
    assert "set `task.mask_probability_end`" in problems(mask_decay="cosine")[0]
    with pytest.raises(ValidationError):
        problems(mask_shares=[1.0])
