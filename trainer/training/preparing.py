"""What prepares rows for the model, and goes with it when it is exported: its tokenizer, or its image processor.

The one place that joins a kind of task, of data and of model; everything else is told of one of them only.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trainer.base.errors import UsageError
from trainer.data.collate import Batching, Normalisation, Padding, TokenMasking
from trainer.data.images import encode_images
from trainer.data.sources import Split
from trainer.data.split import EncodedSplit
from trainer.data.tokenise import encode_split
from trainer.models.building import load_tokenizer, vocabulary_size
from trainer.models.images import ImageProcessor, load_image_processor
from trainer.recipe.schema import ImageClassification, Recipe
from trainer.tasks.task import ImageTask, Task, TextTask


class Preparation(Protocol):
    """Makes rows what the model reads."""

    @property
    def batching(self) -> Batching:
        """How prepared rows become the tensors of a microbatch."""
        ...

    @property
    def normalisation(self) -> str | None:
        """What `batching` does to the values of prepared rows, in words; None: they stay as they are."""
        ...

    def encode(self, split: Split, task: Task, cache: Path) -> EncodedSplit:
        """The split as it is kept; `task` is resolved, and of the recipe.

        Raises:
            TrainerError: the rows do not fit, or the cache cannot be written.
        """
        ...

    def masking(self, task: Task, seed: int) -> TokenMasking | None:
        """What makes the labels of prepared rows while they become microbatches; None: prepared rows have labels.

        Args:
            task: of the recipe.
            seed: the recipe's.

        Raises:
            UsageError: the task hides tokens, and there is no token to hide them with.
        """
        ...

    def save(self, folder: Path) -> None:
        """Writes what a user of the exported model needs to prepare rows in the same way.

        Raises:
            OSError: it cannot be written.
        """
        ...


def load_preparation(recipe: Recipe) -> Preparation:
    """What the recipe's task and model need.

    Raises:
        UsageError: the model has none, or it cannot be reached.
    """
    if isinstance(recipe.task, ImageClassification):
        return ImagePreparation(load_image_processor(recipe.model))
    return TextPreparation(load_tokenizer(recipe.model), recipe.data.max_length, vocabulary_size(recipe.model))


@dataclass(frozen=True)
class TextPreparation:
    """Tokenises texts, cut at `max_length` tokens, for a model with embeddings for `vocab_size` (None: any) tokens.

    A token without an embedding is refused here, by its name: on a GPU it ends the process in the midst of a kernel.
    """

    tokenizer: Any
    max_length: int
    vocab_size: int | None = None

    normalisation = None

    @property
    def batching(self) -> Padding:
        padding = Padding.of(self.tokenizer)
        self._require_embedding(padding.token_id)
        return padding

    def encode(self, split: Split, task: Task, cache: Path) -> EncodedSplit:
        assert isinstance(task, TextTask)
        encoded = encode_split(split, task, self.tokenizer, self.max_length, cache)
        self._require_embedding(int(encoded.tokens["input_ids"].max(initial=0)))
        return encoded

    def masking(self, task: Task, seed: int) -> TokenMasking | None:
        assert isinstance(task, TextTask)
        masking = task.masking(self.tokenizer, seed)
        if masking is not None:
            self._require_embedding(max(masking.mask_token, *masking.ordinary_tokens.tolist()))
        return masking

    def _require_embedding(self, token_id: int) -> None:
        if self.vocab_size is not None and token_id >= self.vocab_size:
            raise UsageError(
                f"the tokenizer `{self.tokenizer.name_or_path}` has the token"
                f" {self.tokenizer.convert_ids_to_tokens(token_id)!r} of id {token_id}, but the model's `vocab_size` is"
                f" {self.vocab_size}; name the model's own tokenizer in `model.tokenizer`, or a model with more tokens"
            )

    def save(self, folder: Path) -> None:
        self.tokenizer.save_pretrained(folder)


@dataclass(frozen=True)
class ImagePreparation:
    """Resizes images; their values are normalised in each batch."""

    processor: ImageProcessor

    @property
    def batching(self) -> Normalisation:
        return Normalisation(self.processor.scale, self.processor.mean, self.processor.std)

    @property
    def normalisation(self) -> str:
        return str(self.batching)

    def encode(self, split: Split, task: Task, cache: Path) -> EncodedSplit:
        assert isinstance(task, ImageTask)
        return encode_images(split, task, self.processor, cache)

    def masking(self, task: Task, seed: int) -> None:
        return None

    def save(self, folder: Path) -> None:
        self.processor.save(folder)
