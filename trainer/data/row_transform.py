"""Rows of sources that become those of a task.

A feature registers a subclass of `RowTransform` as `rows`, under the key of the recipe that describes the rows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trainer.base.errors import UsageError
from trainer.data.formats.base import CellKind, Row
from trainer.recipe.registered import all_of
from trainer.recipe.schema import Data, FileData

if TYPE_CHECKING:
    from datasets import Dataset


class SourceTransform(Protocol):
    """The transform of a source with known columns.

    Attributes:
        columns: the names of the columns that it makes.
        drops_rows: whether it leaves rows out.
        facts: change with the transform, for caches of its rows.
    """

    @property
    def columns(self) -> Collection[str]: ...

    @property
    def drops_rows(self) -> bool: ...

    @property
    def facts(self) -> object: ...

    def reads(self, wanted: Sequence[str]) -> tuple[str, ...]:
        """Return the columns of the source that it needs for those that the task reads, each once."""
        ...

    def of_table(self, rows: Dataset, first_row: int, where: str) -> Dataset:
        """Return the rows for a part of the source, perhaps none; `first_row` is the index of its first row.

        Raises:
            DataError: a value cannot be used.
        """
        ...

    def of_rows(self, rows: Sequence[Row], first_row: int, where: str) -> list[Row]:
        """Return the rows for consecutive rows of a file to predict; none is left out.

        Raises:
            DataError: a value cannot be used.
        """
        ...


class RowTransform:
    """The transform of the sources of a recipe, or of an entry of `data.train`. This class leaves rows as they are."""

    @classmethod
    def of(cls, data: Data) -> RowTransform:
        """Return the transform of a recipe."""
        return cls()

    @classmethod
    def of_entries(cls, data: FileData) -> Sequence[RowTransform] | None:
        """Return the transform of each entry of `data.train`; None: they share that of the recipe."""
        return None

    @property
    def facts(self) -> object:
        """The facts that change with the transform, for predictions that continue."""
        return None

    def kinds(self, kinds: Mapping[str, CellKind]) -> dict[str, CellKind]:
        """Return the kinds of the columns of a CSV file, given those of the columns that the task reads."""
        return dict(kinds)

    def of_source(self, rows: Dataset, wanted: Sequence[str], where: str) -> SourceTransform | None:
        """Return the transform of the source that begins with `rows`; None: it leaves them as they are.

        Raises:
            DataError: a column is missing.
        """
        return None

    def of_input(self, rows: Sequence[Row], wanted: Sequence[str], where: str) -> SourceTransform | None:
        """Return the transform of a file to predict, given its first rows, which need no answers; see `of_source`."""
        return None

    def whole(
        self, rows: Dataset, wanted: Sequence[str], where: str
    ) -> tuple[Dataset, NDArray[np.int64] | None, list[str]]:
        """Return the rows for all rows of a source, the index of each if some are left out, and notes for the user.

        Args:
            wanted: the columns that the task reads; others may be left out.

        Raises:
            DataError: a column is missing, a value cannot be used, or no row is left.
        """
        return rows, None, []

    def fix(self, column: str, value: Any) -> str | None:
        """Return how to leave out the rows with a value in a column of the task; None: there is no way.

        Args:
            value: null, NaN, a blank text, or a text where others are numbers.
        """
        return None


def transform_of(data: Data) -> RowTransform:
    """Return the transform of a recipe.

    Raises:
        UsageError: several are registered.
    """
    names: dict[str, type[RowTransform]] = all_of("rows")
    if len(names) > 1:
        raise UsageError(f"rows are transformed once, but {', '.join(names)} are registered; uninstall one's package")
    return next(iter(names.values()), RowTransform).of(data)
