"""The preparation of rows for the model, as its users see it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from trainer.data.collate import Batching
from trainer.data.encoding import RowEncoding
from trainer.data.sources import Split
from trainer.data.split import EncodedSplit
from trainer.parallel.microbatch import TokenMasking
from trainer.recipe.schema import Model
from trainer.tasks.task import Task
from trainer.tasks.types import Tokenizer


@dataclass(frozen=True)
class ModelFolder:
    """The parts of a task in the folder of its model, and notes on their differences from the recipe."""

    notes: tuple[str, ...]

    def completed(self, task: Task) -> Task:
        """Return the task with these parts."""
        return task


class Preparation(ABC):
    """Turns rows into inputs of the model.

    Attributes:
        labels: names of a fine-tuned checkpoint's classes, in order; None: it has none.
        notes: notes on the preparation for the user.
        config: the configuration of transformers.
        model_folder: the parts of the task in the model's folder; None: there are none.
        counts_tokens: whether rows have the tokens of the model; false: another tokenizer stands in for a check.
    """

    labels: tuple[str, ...] | None
    notes: tuple[str, ...] = ()
    config: Any
    model_folder: ModelFolder | None = None
    counts_tokens: bool = True

    @property
    @abstractmethod
    def batching(self) -> Batching:
        """The way from prepared rows to the tensors of a microbatch."""

    @property
    def text_tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None: rows are not of texts."""
        return None

    @property
    def padding_token(self) -> int | None:
        """Id of the token that fills short rows; None: rows are not of tokens."""
        return None

    @property
    def normalisation(self) -> str | None:
        """How `batching` changes the values of prepared rows, in words; None: not at all."""
        return None

    @property
    def other_processor(self) -> dict[str, Any] | None:
        """The class of transformers with which other programs prepare rows: its name, `options` and `inputs`, as JSON.

        None: they get prepared rows.
        """
        return None

    def recording(self) -> Preparation:
        """Return the preparation that keeps rows for `other_processor`, in the order of their preparation."""
        return self

    def recorded(self, rows: Sequence[int], num_rows: int) -> list[NDArray[Any]]:
        """Return some of the last `num_rows` rows that were kept."""
        raise NotImplementedError

    def prepares_for(self, model: Model, config: Any) -> bool:
        """Return whether another model, with its configuration, prepares rows that are not texts in the same way."""
        raise NotImplementedError

    @abstractmethod
    def encode(self, split: Split, task: Task, cache: Path) -> EncodedSplit:
        """Return the prepared split; `task` is the resolved task of the recipe.

        Raises:
            TrainerError: The rows do not fit, or the cache cannot be written.
        """

    @abstractmethod
    def encoding(self, task: Task, first: EncodedSplit) -> RowEncoding:
        """Return the encoding of the rows of a split that is read in parts; `first` are its first rows, prepared."""

    def masking(self, task: Task, seed: int) -> TokenMasking | None:
        """Return the masking that makes labels while rows become microbatches; None: prepared rows have labels.

        Raises:
            UsageError: The task hides tokens, but the tokenizer has no mask token.
        """
        return None

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the files with which users of the exported model prepare rows in the same way.

        Raises:
            OSError: They cannot be written.
        """
