"""Records of what a model will see: rows with marked tokens, lengths, classes and kinds of parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mark = Literal["trained", "masked", "input", "padding", "cut"]
"""`trained`: the loss has a label for the token; `masked`: the model predicts the hidden token; `input`: it is read."""


@dataclass(frozen=True)
class Piece:
    """Neighbouring tokens of one mark; `note` is a class, `answer`, or the start of a packed document."""

    mark: Mark
    text: str
    note: str = ""


@dataclass(frozen=True)
class ShownText:
    """A text of a row, by its role, such as `chosen`; its number of tokens is without padding."""

    role: str
    tokens: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class ShownRow:
    """A row, by its index in the split from 0; `label` is empty if only its tokens have labels.

    `window` names the window of a long row of the source, and its place among all windows of this row.
    """

    row: int
    label: str
    texts: tuple[ShownText, ...]
    window: str = ""


@dataclass(frozen=True)
class ShownSplit:
    """The lengths of a split, and the share of its tokens with a label.

    `histogram` has the number of rows up to each length; `uncut` is the same of the first rows without a maximum
    length. `trained` is None if rows, or random tokens, have the labels.
    """

    name: str
    rows: int
    cut: int
    max_length: int
    longest: int
    histogram: tuple[tuple[int, int], ...]
    trained: float | None
    uncut: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class ShownClass:
    """A class, the number of its training rows, and its weight in the loss."""

    name: str
    rows: int
    weight: float


@dataclass(frozen=True)
class Preview:
    """The first microbatch of a rank in step 1, rows of a split, and facts on the splits and the parameters.

    `kinds` is a table, its header first: trained and frozen parameters with their types.
    """

    name: str
    task: str
    step: tuple[ShownRow, ...]
    splits: tuple[ShownSplit, ...]
    classes: tuple[ShownClass, ...]
    rows: tuple[ShownRow, ...] = ()
    kinds: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()
