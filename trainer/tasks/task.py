"""What the rest of the trainer asks of a task; nothing outside this room knows which task it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor

from trainer.parallel.cross_entropy import VocabularyCut
from trainer.tasks.masking import Masking
from trainer.tasks.types import Dataset, ImageProcessor, Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Self


class Task(Protocol):
    """Turns model outputs into a loss, and predictions into metrics; what it makes of rows, `TextTask` and so on say.

    A task is immutable. Fresh from `build_task` it may not know its labels yet; `resolve` gives the one that does.
    """

    @property
    def auto_class_name(self) -> str:
        """The transformers auto class that builds the model, such as `AutoModelForSequenceClassification`."""
        ...

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the data set that the task reads; all others are left alone."""
        ...

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The metrics that `metrics` computes, the deciding one first."""
        ...

    @property
    def rows_are_labels(self) -> bool:
        """Whether every row holds one valid label, so that the loss is divided by a number of rows."""
        ...

    @property
    def fingerprint(self) -> str:
        """Changes whenever the same rows, prepared by the same tokenizer or image processor, would give others."""
        ...

    def resolve(self, train: Dataset, where: str) -> Self:
        """Completes the task with the labels of the training split.

        Args:
            train: the training split.
            where: the split and its source, for messages.

        Raises:
            DataError: a column is missing or of the wrong type, or the labels do not form classes.
            UsageError: a metric that is not defined for these labels.
        """
        ...

    def model_options(self) -> dict[str, Any]:
        """The keys that a resolved task sets in the model's configuration."""
        ...

    def check_columns(self, features: Mapping[str, Any], where: str) -> None:
        """Refuses a split that lacks a column, or holds the wrong type in it.

        Raises:
            DataError: names the column and the columns that there are.
        """
        ...

    def for_vocabulary(self, cut: VocabularyCut | None) -> Self:
        """The task for a model whose logits are cut over its vocabulary; None: they are whole."""
        ...

    def num_valid(self, labels: Tensor) -> Tensor:
        """How many of `labels` `[batch, ...]` enter the loss: an int64 scalar on their device."""
        ...

    def loss_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss, summed (never averaged) over all valid labels: a float32 scalar.

        Args:
            logits: `[batch, ...]`, of any floating dtype; after `for_vocabulary`, this rank's columns of them, and
                every rank of that group must call.
            labels: `[batch, ...]`.
        """
        ...

    def predictions(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """What `metrics` needs of each row: small tensors on the CPU, each `[batch, ...]`; called as `loss_sum` is."""
        ...

    def metrics(self, predictions: Mapping[str, Tensor]) -> dict[str, float]:
        """The metrics over the predictions of a whole split, each tensor `[rows, ...]`, in any order of rows."""
        ...


@runtime_checkable
class TextTask(Task, Protocol):
    """A task on texts."""

    def encode(
        self, rows: Dataset, tokenizer: Tokenizer, max_length: int, where: str, first_row: int
    ) -> dict[str, list[Any]]:
        """Tokenises rows and turns their labels into numbers.

        Args:
            rows: some consecutive rows of a split that passed `check_columns`.
            tokenizer: that of the model.
            max_length: the most tokens of a row; what is longer is cut.
            where: the split and its source, for messages.
            first_row: the 0-based place of `rows[0]` in the split; messages count from 1.

        Returns:
            The tokenizer's columns (`input_ids` and what belongs to it: one list of integers for each row); `labels`:
            one number for each row, or one list as long as that row's `input_ids`, and none where there is a `masking`;
            `cut`: whether the row was cut.

        Raises:
            DataError: a value that does not fit; names the column, the row and the value.
        """
        ...

    def masking(self, tokenizer: Tokenizer, seed: int) -> Masking | None:
        """What makes the labels of encoded rows from their tokens, anew in each epoch; None: `encode` gives labels.

        Args:
            tokenizer: that of the model.
            seed: the recipe's.

        Raises:
            UsageError: the tokenizer has no token to mask with.
        """
        ...


@runtime_checkable
class ImageTask(Task, Protocol):
    """A task on images."""

    def encode_images(
        self, rows: Dataset, processor: ImageProcessor, where: str, first_row: int
    ) -> dict[str, list[Any]]:
        """Reads the images of rows and turns their labels into numbers.

        Args:
            rows: as for `TextTask.encode`.
            processor: that of the model.
            where: likewise.
            first_row: likewise.

        Returns:
            `pixel_values`: an array of uint8 `[channels, height, width]` for each row; `labels`: one number for each.

        Raises:
            DataError: a value that does not fit; names the column, the row and the value.
        """
        ...
