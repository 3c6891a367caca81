"""The key `leave_out` of the section `data` of a recipe, and its rule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from trainer.recipe.schema import Data, DataKeys
from trainer.recipe.schema.fields import PathField
from trainer.recipe.schema.section import Contradiction, clash

_KEY = "data.leave_out"


class LeaveOutKeys(DataKeys):
    """The files of rows to leave out."""

    leave_out: PathField | list[PathField] | None = None
    """CSV files with the numbers of training rows to leave out, in a column `row` (from 1), as `trainer audit --write`
    writes them; each file counts the rows that those before it leave. The validation split stays as it is."""


def files_of(data: Data) -> list[str]:
    """Return the files of a recipe."""
    named = cast(LeaveOutKeys, data).leave_out
    return [] if named is None else [named] if isinstance(named, str) else named


def contradictions(data: Data) -> Iterator[Contradiction]:
    if files_of(data) and getattr(data, "streaming", False):
        yield clash("names rows by their numbers, but `data.streaming` is true; set one of them to null", _KEY)
