"""Entities in sequences of tags, and their counts.

Tags have the form of IOB2 (Tjong Kim Sang & Veenstra 1999, arXiv:cs/9907006) or IOBES. The rules for entities are those
of the script `conlleval` of CoNLL-2000, which accepts an I- without a B-.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Indices: TypeAlias = NDArray[np.int64]
OUTSIDE = "O"
_TAG = re.compile(r"([BIES])-(.+)")


@dataclass(frozen=True)
class Entities:
    """Entities in flat tags: entity `i` covers the words `start[i] : end[i]` and has the type `type[i]`."""

    start: Indices
    end: Indices
    type: Indices


class TagScheme:
    """The meaning of tags as parts of entities."""

    def __init__(self, names: Sequence[str]) -> None:
        parts = [_TAG.fullmatch(name) for name in names]
        self.types = tuple(sorted({part[2] for part in parts if part}))
        prefixes = [part[1] if part else "" for part in parts]
        # The last element is for words without a prediction, of index -1.
        self._type = np.array([*(self.types.index(part[2]) if part else -1 for part in parts), -1])
        self._open = np.array([*(prefix in ("B", "I") for prefix in prefixes), False])
        self._inside = np.array([*(prefix in ("I", "E") for prefix in prefixes), False])

    def entities(self, tags: Indices, is_first: NDArray[np.bool_]) -> Entities:
        """Return the entities of rows in a flat array.

        Args:
            tags: the index of each tag in `names`, or -1 for none, of shape `[words]`.
            is_first: whether each word is the first of its row, of shape `[words]`.
        """
        types = self._type[tags]
        joins: NDArray[np.bool_] = np.zeros(len(tags), bool)  # whether a word belongs to the entity of the word before
        joins[1:] = self._open[tags[:-1]] & self._inside[tags[1:]] & (types[:-1] == types[1:]) & ~is_first[1:]
        start = np.flatnonzero(~joins & (types >= 0))
        borders: Indices = np.append(np.flatnonzero(~joins), len(tags))
        return Entities(start, borders[np.searchsorted(borders, start, side="right")], types[start])

    def counts(self, predicted: Entities, true: Entities) -> tuple[Indices, Indices, Indices]:
        """Return, for each type, the number of correct, predicted and true entities.

        A predicted entity is correct if its start, end and type are those of a true entity.
        """
        _, left, right = np.intersect1d(predicted.start, true.start, assume_unique=True, return_indices=True)
        same = (predicted.end[left] == true.end[right]) & (predicted.type[left] == true.type[right])
        found = (predicted.type[left[same]], predicted.type, true.type)
        correct, num_predicted, num_true = (np.bincount(types, minlength=len(self.types)) for types in found)
        return correct, num_predicted, num_true


def scheme_of(names: Sequence[str]) -> TagScheme | None:
    """Return the scheme of tags in IOB2 or IOBES; None for plain tags, such as parts of speech."""
    scheme = TagScheme(names)
    return scheme if scheme.types and all(name == OUTSIDE or _TAG.fullmatch(name) for name in names) else None


def tags_of_span(label: str, num_words: int, names: Sequence[str]) -> list[str]:
    """Return the tags of the words of an entity, in IOBES if `names` has its tags, else in IOB2."""
    single, last = (
        new if f"{new}-{label}" in names else old for new, old in (("S", "B"), ("E", "I"))
    )  # fmt: skip
    prefixes = [single] if num_words == 1 else ["B", *["I"] * (num_words - 2), last]
    return [f"{prefix}-{label}" for prefix in prefixes]


def continuation(name: str, names: Sequence[str]) -> str:
    """Return the tag of the further tokens of a word: I- for B- and S-, if `names` has it, else the same tag."""
    inside = f"I-{name[2:]}"
    return inside if name.startswith(("B-", "S-")) and inside in names else name


def entity_metrics(
    scheme: TagScheme, predicted: Indices, true: Indices, is_first: NDArray[np.bool_], names: Sequence[str]
) -> dict[str, float]:
    """Return the metrics `names` of whole entities; with `f1`, also that of each type, as `f1/PER`."""
    found = scheme.counts(scheme.entities(predicted, is_first), scheme.entities(true, is_first))
    right, num_predicted, num_true = found
    f1 = 2 * right / np.maximum(num_predicted + num_true, 1)
    seen = num_predicted + num_true > 0
    values = {
        "f1": 2 * right.sum() / max(1, num_predicted.sum() + num_true.sum()),
        "precision": right.sum() / max(1, num_predicted.sum()),
        "recall": right.sum() / max(1, num_true.sum()),
        "f1_macro": f1[seen].mean() if seen.any() else 0.0,  # undefined for types that do not occur
    }
    computed = {name: float(value) for name, value in values.items() if name in names}
    if "f1" in names:
        computed |= {f"f1/{name}": float(value) for name, value in zip(scheme.types, f1, strict=True)}
    return computed
