"""Training splits that a feature reads: each is registered as a `source` under the key that asks for it.

The first rows of such a split stand for it in checks and notes. A run then opens it, and reads it while it trains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trainer.checkpoint.counters import Progress
from trainer.data.loader import TrainingRows
from trainer.data.sources import Split
from trainer.data.split import EncodedSplit
from trainer.recipe.registered import asked_for
from trainer.recipe.schema import Recipe
from trainer.tasks.task import Task
from trainer.tasks.types import Dataset
from trainer.training.preparation import Preparation


class Shares(Protocol):
    """The rows of an epoch, and of each source of a mixture: those that an epoch takes, and those that there are."""

    @property
    def num_rows(self) -> int: ...

    @property
    def counts(self) -> Sequence[int]: ...

    @property
    def sizes(self) -> Sequence[int]: ...


class OpenedSplit(Protocol):
    """A training split that is read during a training.

    Attributes:
        content_hash: changes with the rows and with their encoding.
    """

    content_hash: str

    @property
    def shares(self) -> Shares: ...

    def __len__(self) -> int:
        """Return the number of encoded rows of an epoch, perhaps an estimate."""
        ...

    def rows(self, recipe: Recipe, progress: Progress) -> TrainingRows:
        """Return the rows of the global batches that `progress` has not passed yet.

        Raises:
            UsageError: no global batch starts there.
        """
        ...


@dataclass(frozen=True)
class RowPart:
    """Consecutive rows of a source; `read` yields them with the number of the first one, and forks may call it."""

    source: int
    where: str
    digest: str  # changes with the rows
    read: Callable[[], Iterator[tuple[int, Dataset]]]


class RowSource:
    """The training split of one recipe; its methods are called in this order."""

    def read(self, recipe: Recipe, columns: Sequence[str]) -> Split:
        """Return the first rows of the split, before a `RowTransform`; a task reads these columns.

        Raises:
            TrainerError: the rows cannot be read.
        """
        raise NotImplementedError

    def check(self, recipe: Recipe, task: Task) -> None:
        """Refuse keys that do not fit these rows.

        Raises:
            UsageError: a key does not fit.
        """

    def open(
        self, recipe: Recipe, task: Task, preparation: Preparation, first: Split, encoded: EncodedSplit, cache: Path
    ) -> OpenedSplit:
        """Return the split for a training; a check does not open it.

        Args:
            first: the first rows, mapped; `encoded` are the same.
            cache: the folder of prepared data.

        Raises:
            TrainerError: the rows cannot be read, or the cache cannot be written.
        """
        raise NotImplementedError

    def parts(self, recipe: Recipe, columns: Sequence[str], cache: Path, most_rows: int) -> Iterator[RowPart]:
        """Yield all rows in the order of the files, with a `RowTransform`, in parts of at most `most_rows` rows."""
        raise NotImplementedError

    def notes(self, recipe: Recipe, num_first: int) -> list[str]:
        """Return notes for the user on the split; checks use its first `num_first` rows."""
        return []


def row_source(recipe: Recipe) -> RowSource | None:
    """Return the source that a recipe asks for; None: its training split is read whole."""
    return next((kind() for kind in asked_for("source", recipe)), None)
