"""Comparisons of outputs, class names and tokens of an exported folder with those of the trained model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.base.errors import TrainerError
from trainer.base.text import for_terminal


class NotTheTrainedModelError(TrainerError):
    """The exported folder is not the trained model."""


def gap_of(one: Tensor, other: Tensor) -> Tensor:
    """Return the distance of each value; that of two equal infinities, or of two values that are none, is 0."""
    # inf - inf is nan, although the values are equal.
    same = (one == other) | (one.isnan() & other.isnan())
    return torch.where(same, 0.0, (one - other).abs()).nan_to_num(math.inf)


def require_same_labels(own: Mapping[Any, str], there: Mapping[Any, str]) -> None:
    """Require the same names of classes, by their number, in two configurations."""
    # JSON has turned the numbers of classes into texts.
    expected, found = ({int(number): name for number, name in one.items()} for one in (own, there))
    if expected != found:
        raise NotTheTrainedModelError(
            f"the exported model must have the classes of the training, {_short(expected)}, but has {_short(found)}; do"
            " not use the folder, and export again"
        )


def require_same_tokens(texts: Sequence[Sequence[str]], own: Mapping[str, Any], there: Mapping[str, Any]) -> None:
    """Require the same tokens of two tokenizers; arguments are texts and results of `folder_reader.tokens_of`."""
    for text, expected, found in zip(texts, own["ids"], there["ids"], strict=True):
        if expected != found:
            raise NotTheTrainedModelError(_other_tokens(text, expected, found))
    for name in ("template", "special"):
        if own[name] != there[name]:
            raise NotTheTrainedModelError(_other_tokens([name], own[name], there[name]))


def _other_tokens(text: Sequence[str], expected: Any, found: Any) -> str:
    return (
        f"the exported tokenizer must be that of the training, but gives {_short(found)} for {_short(text)}, and the"
        f" training had {_short(expected)}; do not use the folder, and export again"
    )


def _short(value: Any) -> str:
    text = for_terminal(repr(value))
    return text if len(text) <= 60 else f"{text[:57]}..."


def texts_of(columns: Sequence[str], rows: Any) -> list[list[str]]:
    """Return the texts of rows, those in chats too, and pairs of the first two columns of texts."""
    texts: list[list[str]] = []
    for row in rows:
        values = [row[name] for name in columns if name in row]
        plain = [value for value in values if isinstance(value, str)]
        found = [text for value in values for text in _strings(value)]
        texts += [[text] for text in found] + ([plain[:2]] if len(plain) > 1 else [])
    return texts


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)
