"""Words of tokenised texts: from tokens to words, and from windows back to the words of whole rows."""

from __future__ import annotations

import unicodedata
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from trainer.features.token_classification.entities import Indices
from trainer.tasks.types import EncodedRows, EvaluatedSplit, Tokenizer

WORD, ROW = "word_numbers", "row_numbers"
"""Columns of encoded rows: for each token, the number of the word that it stands for, from 1, or 0; for each window,
the index of its row."""


@dataclass(frozen=True)
class TokenisedText:
    """A tokenised row: the tokenizer's columns, the first and the last content token, and the words of the content."""

    columns: dict[str, list[int]]
    start: int
    end: int
    word_of: list[int]  # for each content token, the index of its word; -1: none
    words: list[tuple[int, int]]  # the characters of each word


def read_words(
    texts: Sequence[str], words: Sequence[Sequence[str]] | None, tokenizer: Tokenizer, each_token: bool
) -> list[TokenisedText]:
    """Tokenise texts, without truncation, and find the word of each token.

    Args:
        words: the words of each text, which are joined by spaces in `texts`; None: the tokenizer divides the texts.
        each_token: whether each token of a text is a word; with `words` it has no effect.
    """
    if not texts:
        return []
    encoded = tokenizer(list(texts), return_offsets_mapping=True, return_attention_mask=False, verbose=False)
    offsets = encoded.pop("offset_mapping")
    read = []
    for row, text in enumerate(texts):
        content = [place for place, sequence in enumerate(encoded.sequence_ids(row)) if sequence is not None]
        start, end = (content[0], content[-1] + 1) if content else (0, 0)
        places = offsets[row][start:end]
        if words is not None:
            ranges = _ranges(words[row])
            word_of = _words_of_tokens(text, places, ranges)
        else:
            word_of, ranges = _words_of_text(text, places, encoded.word_ids(row)[start:end], each_token)
        columns = {name: values[row] for name, values in encoded.items()}
        read.append(TokenisedText(columns, start, end, word_of, ranges))
    return read


def _ranges(words: Sequence[str]) -> list[tuple[int, int]]:
    ranges, start = [], 0
    for word in words:
        ranges.append((start, start + len(word)))
        start += len(word) + 1
    return ranges


def _visible(text: str, place: tuple[int, int]) -> tuple[int, int]:
    """Return the characters of a token without the white space around it."""
    start, end = place
    while start < end and text[start].isspace():
        start += 1
    while start < end and text[end - 1].isspace():
        end -= 1
    return start, end


def _words_of_tokens(text: str, places: Sequence[tuple[int, int]], words: Sequence[tuple[int, int]]) -> list[int]:
    """Return for each token the index of the word in which it starts; -1 for white space only."""
    starts = [start for start, _ in words]
    seen = [_visible(text, place) for place in places]
    # An empty word starts where no character is.
    return [bisect_right(starts, start) - 1 if end > start else -1 for start, end in seen]


def _words_of_text(
    text: str, places: Sequence[tuple[int, int]], ids: Sequence[int | None], each_token: bool
) -> tuple[list[int], list[tuple[int, int]]]:
    """Divide a text into words: the tokenizer's, divided further before and after punctuation.

    Tokenizers of SentencePiece put punctuation into words.

    Args:
        ids: the tokenizer's index of each token's word.
        each_token: whether each token is a word.

    Returns:
        For each token, the index of its word, or -1 for white space only; the characters of each word.
    """
    word_of: list[int] = []
    words: list[tuple[int, int]] = []
    last = None
    for place, word in zip(places, ids, strict=True):
        start, end = _visible(text, place)
        if start == end:
            word_of.append(-1)
            continue
        apart = each_token or word != last or start == 0 or _separates(text[start - 1]) or _separates(text[start])
        if words and (start < words[-1][1] or not apart):  # tokens of bytes share their character
            words[-1] = (words[-1][0], max(end, words[-1][1]))
        else:
            words.append((start, end))
        word_of.append(len(words) - 1)
        last = word
    return word_of, words


def _separates(character: str) -> bool:
    return character.isspace() or unicodedata.category(character)[0] in "PS"


def num_words_of(split: EvaluatedSplit) -> Indices:
    """Return the number of words of each row, of shape `[rows]`."""
    rows: Indices = np.repeat(split.encoded.scalars[ROW], np.diff(split.encoded.offsets))
    return np.bincount(rows[split.encoded.tokens[WORD] > 0], minlength=len(split.rows))


def of_words(
    answers: Mapping[str, Tensor], name: str, encoded: EncodedRows, num_words: Indices, fill: float
) -> NDArray[Any]:
    """Return the answers of words, of shape `[words]`; all are `fill` if there are no answers, without any token."""
    if not answers:
        return np.full(int(num_words.sum()), fill)
    return joined(_of_tokens(answers[name], encoded), encoded, num_words, fill)


def joined(values: NDArray[Any], encoded: EncodedRows, num_words: Indices, fill: float) -> NDArray[Any]:
    """Return the values of the first tokens of words, of shape `[words]`; `fill` for words without a token.

    Args:
        values: one value for each token, of shape `[tokens]`.
        encoded: the windows of all rows.
        num_words: the number of words of each row, of shape `[rows]`.
    """
    numbers = np.asarray(encoded.tokens[WORD])
    chosen = numbers > 0
    rows = np.repeat(encoded.scalars[ROW], np.diff(encoded.offsets))[chosen]
    found = np.full(int(num_words.sum()), fill, values.dtype)
    # The place of a word: the words of all rows before its own, and those before it there.
    found[(np.cumsum(num_words) - num_words)[rows] + numbers[chosen] - 1] = values[chosen]
    return found


def _of_tokens(values: Tensor, encoded: EncodedRows) -> NDArray[Any]:
    """Return padded values `[windows, sequence]` without padding, of shape `[tokens]`."""
    lengths = np.diff(encoded.offsets)
    found: NDArray[Any] = values.numpy()[np.arange(values.shape[1]) < lengths[:, None]]
    return found


def is_first(num_words: Indices) -> NDArray[np.bool_]:
    """Return whether each word is the first of its row, of shape `[words]`."""
    first: NDArray[np.bool_] = np.zeros(int(num_words.sum()), bool)
    first[(np.cumsum(num_words) - num_words)[num_words > 0]] = True
    return first
