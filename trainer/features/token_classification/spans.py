"""Entities as spans of characters: reading a column of spans, and the tags of the words in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer.base.errors import DataError
from trainer.features.token_classification.entities import OUTSIDE, scheme_of, tags_of_span
from trainer.features.token_classification.words import TokenisedText
from trainer.tasks.text.columns import dtype_in_list, shown

_KEYS = ("start", "end", "label")


def holds_spans(feature: Any) -> bool:
    """Return whether a column holds lists of {start, end, label}, or empty lists only."""
    if isinstance(feature, dict):  # a `Sequence` of dictionaries of `datasets`
        return set(_KEYS) <= feature.keys()
    inner = getattr(feature, "feature", None)
    return set(_KEYS) <= inner.keys() if isinstance(inner, dict) else dtype_in_list(feature) == "null"


def read_spans(value: Any, place: str) -> list[tuple[int, int, str]]:
    """Return the spans of one row as (start, end, label).

    Raises:
        DataError: the list or a value of a span is null, or has the wrong type.
    """
    if value is None:
        raise DataError(f"{place} is null; a row without entities has an empty list")
    if isinstance(value, dict):
        value = [dict(zip(value, span, strict=True)) for span in zip(*value.values(), strict=True)]
    spans = []
    for span in value:
        start, end, label = (span[key] if span else None for key in _KEYS)
        if not isinstance(start, int) or not isinstance(end, int) or not isinstance(label, str):
            raise DataError(f"{place} has the span {span}; a span needs start and end (integers) and label (a string)")
        spans.append((start, end, label))
    return spans


def tags_of_words(
    text: str, value: Any, read: TokenisedText, names: Sequence[str], by_token: bool, place: str
) -> list[str]:
    """Return the tag of each word of a text.

    Args:
        by_token: whether each token is a word, for messages.

    Raises:
        DataError: spans overlap, lie outside of the text, divide a word or have an unknown label.
    """
    tags = [OUTSIDE] * len(read.words)
    starts = {start: word for word, (start, _) in enumerate(read.words)}
    ends = {end: word + 1 for word, (_, end) in enumerate(read.words)}
    last: tuple[int, int, str] | None = None
    # In the order of their starts, so that a span can overlap the one before it only.
    for span in sorted(read_spans(value, place)):
        start, end, label = span
        if not 0 <= start < end <= len(text):
            raise DataError(
                f"{place} has the span {_span(span)}, but the text has {len(text)} characters; a span is"
                " start >= 0, before its end, in characters of the text"
            )
        if last is not None and start < last[1]:
            raise DataError(f"{place} has spans that overlap: {_span(last)} and {_span(span)}; keep one of them")
        if start not in starts or end not in ends:
            unit, other = ("token", "") if by_token else ("word", ", or set `task.label_all` to true")
            near = " ".join(text[s:e] for s, e in read.words if s < end and start < e)
            raise DataError(
                f"{place} has the span {_span(span)}, {text[start:end]!r}, which does not start and end with a"
                f" {unit} of the tokenizer ({near!r}); correct the span{other}"
            )
        if f"B-{label}" not in names:
            known = scheme_of(names)
            raise DataError(
                f"{place} has the label {label!r}, which is not among those of the training split or of"
                f" `task.labels`: {shown(known.types if known else names)}"
            )
        tags[starts[start] : ends[end]] = tags_of_span(label, ends[end] - starts[start], names)
        last = span
    return tags


def _span(span: tuple[int, int, str]) -> str:
    start, end, label = span
    return f"{start}-{end} {label}"
