"""How previews show the rows of a task: the names of texts, labels in words, and the marks of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from trainer.parallel.microbatch import IGNORED_LABEL
from trainer.tasks.types import EncodedRows

Inputs = Mapping[str, Tensor]
"""The inputs of one row, or of one text of a row."""


@dataclass(frozen=True)
class ShownToken:
    """A token of a text; neighbours with equal fields but the first form a piece. `group` is a word or a document."""

    token: int
    mark: Literal["input", "masked", "trained"] = "input"
    note: str = ""
    group: int = 0


@dataclass(frozen=True)
class RowPreview:
    """The preview of rows; the default shows numbers and names of classes.

    Attributes:
        classes: the names of classes.
        roles: the names of the texts of a row; further texts have numbers.
        num_trained: the first texts of a row, with gradients; None: all have them.
    """

    classes: Mapping[int, str] = field(default_factory=dict)
    roles: tuple[str, ...] = ()
    num_trained: int | None = None

    def role(self, place: int) -> str:
        return self.roles[place] if place < len(self.roles) else f"text {place}"

    def label(self, labels: Tensor, inputs: Inputs) -> str:
        """Return the label of a row; empty if tokens have labels."""
        if "decoder_input_ids" in inputs or has_token_labels(labels, inputs):
            return ""
        values = labels.flatten().tolist()
        if len(self.classes) > 1:
            if labels.dim() == 0:
                return str(self.classes[int(labels)])
            return ", ".join(str(self.classes[place]) for place, value in enumerate(values) if value)
        return ", ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)

    def tokens(self, ids: Sequence[int], labels: Tensor, inputs: Inputs) -> Sequence[ShownToken]:
        """Return the tokens `ids` of a text without labels of tokens; `labels` are those of its row."""
        return [ShownToken(token) for token in ids]

    def labelled(self, ids: Sequence[int], labels: Sequence[Any], inputs: Inputs) -> Sequence[ShownToken]:
        """Return the tokens `ids` of a text; each has a label."""
        return [
            ShownToken(token) if label == IGNORED_LABEL else ShownToken(token, "trained", f"{label:g}")
            for token, label in zip(ids, labels, strict=True)
        ]

    def source_rows(self, encoded: EncodedRows) -> NDArray[Any] | None:
        """Return the row of the source of each encoded row; None: they are the same."""
        return None

    def window(self, encoded: EncodedRows, row: int) -> str:
        """Return the place of a window among those of its row; empty if the row has no other."""
        sources = self.source_rows(encoded)
        if sources is None:
            return ""
        rows = np.flatnonzero(sources == sources[row]).tolist()
        return f"window {rows.index(row) + 1} of {len(rows)} of row {int(sources[row]) + 1}" if len(rows) > 1 else ""


class NextTokens(RowPreview):
    """The preview of rows with the next tokens as labels; `position_ids` part documents."""

    def labelled(self, ids: Sequence[int], labels: Sequence[Any], inputs: Inputs) -> Sequence[ShownToken]:
        return [*self._documents(ids, labels, inputs.get("position_ids"))]

    @staticmethod
    def _documents(ids: Sequence[int], labels: Sequence[int], positions: Tensor | None) -> Iterator[ShownToken]:
        """Yield the tokens of documents. The label of each is the next one; the last one may be a label only."""
        # `DocumentPacker` numbers the positions of each document from 0.
        starts = [0] if positions is None else (positions[: len(ids)] == 0).nonzero().flatten().tolist()
        for number, (start, end) in enumerate(pairwise([*starts, len(ids)])):
            note = f"document {number + 1}" if len(starts) > 1 else ""
            yield ShownToken(ids[start], "input", note, number)
            for place in range(start, end):
                if labels[place] != IGNORED_LABEL:
                    yield ShownToken(labels[place], "trained", "", number)
                elif place + 1 < end:
                    yield ShownToken(ids[place + 1], "input", note, number)


def has_token_labels(labels: Tensor, inputs: Inputs) -> bool:
    """Return whether each token of a row has a label."""
    ids = inputs.get("input_ids")
    return ids is not None and labels.shape == ids.shape
