"""Preparation of rows for the model, by its tokenizer or another part, which an export includes."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trainer.base.disk import numbered_errors
from trainer.base.errors import DataError, Problems, TrainerError, UsageError
from trainer.base.extensions import resolved
from trainer.data.collate import Padding
from trainer.data.encoding import RowEncoding
from trainer.data.sources import Split
from trainer.data.split import EncodedSplit
from trainer.data.tokenised_split import encode_split, tokenizer_digest
from trainer.models.configuration import (
    checkpoint_labels,
    load_config,
    max_positions,
    reads_end_tokens,
    require_constant_rotations,
    require_no_router_loss,
    vocabulary_size,
)
from trainer.models.tokenizer import load_tokenizer, name_target_language, set_languages, tokenizer_notes
from trainer.parallel.microbatch import TokenMasking
from trainer.recipe.schema import Recipe
from trainer.tasks.registry import build_task
from trainer.tasks.task import Task, TextTask
from trainer.tasks.types import Dataset, Tokenizer
from trainer.training.preparation import ModelFolder, Preparation


def load_preparation(recipe: Recipe) -> Preparation:
    """Return the preparation for the recipe's task and model.

    Raises:
        UsageError: The model has no such part as a tokenizer, or it cannot be reached.
    """
    if recipe.task.other_inputs is not None:
        preparation: Preparation = resolved(recipe.task.other_inputs.preparation)(recipe)
        return preparation
    problems = Problems()
    # Model, tokenizer and folder are checked each, so that the user sees all problems at once.
    with problems.collect():
        config = load_config(recipe.model, {})
        require_fit(recipe, config)
    with problems.collect():
        tokenizer = tokenizer_of(recipe)
    with problems.collect():
        folder = model_folder(recipe)
    problems.raise_all()
    notes = list(folder.notes) if folder else []
    if recipe.task.languages is not None:
        name_target_language(config, tokenizer)
    size = vocabulary_size(config)
    notes += tokenizer_notes(recipe.model, tokenizer, size)
    labels = checkpoint_labels(recipe.model, config)
    processes = recipe.data.preparation_processes
    return TextPreparation(
        tokenizer, recipe.data.max_length, size, labels, tuple(notes), config, processes, recipe.data.pad_to, folder
    )


def tokenizer_of(recipe: Recipe) -> Tokenizer:
    """Return the tokenizer of a recipe's model, in the languages of its task.

    Raises:
        UsageError: there is none, or it does not know the languages.
    """
    tokenizer: Tokenizer = load_tokenizer(recipe.model)
    if tokenizer.chat_template is not None:
        from trainer.tasks.text.answers import encoder_of_chats

        # A chat template may ask for today's date; a fixed one keeps rows and cache equal on later days.
        if chats := encoder_of_chats():
            chats.set_date(tokenizer, recipe.data.date)
    if recipe.task.languages is not None:
        set_languages(tokenizer, *recipe.task.languages)
    return tokenizer


def require_fit(recipe: Recipe, config: Any) -> None:
    """Require a model of texts that fits the task and the length of texts."""
    require_positions(recipe, config, "the model")
    task = build_task(recipe.task)
    require_fitting_rotations(recipe, config, task)
    require_no_router_loss(config, task.auto_class_name)


def require_positions(recipe: Recipe, config: Any, model: str) -> None:
    """Refuse rows with more tokens than a model, by its name in messages, has positions for."""
    longest = max_positions(config)
    if longest is not None and recipe.data.max_length > longest:
        raise UsageError(
            f"`data.max_length` must be at most the {longest} tokens that {model} has positions for, but is"
            f" {recipe.data.max_length}; lower it"
        )


def require_fitting_rotations(recipe: Recipe, config: Any, task: Task) -> None:
    """Refuse rotary positions that depend on the length of rows, with the tokens that the task generates."""
    longest, key = recipe.data.max_length, "`data.max_length`"
    if task.generates and task.generation is not None:
        longest += task.generation.max_new_tokens
        key += " with `task.generation.max_new_tokens`"
    require_constant_rotations(config, longest, key)


def resolve_task(task: Task, preparation: Preparation, train: Split) -> tuple[Task, list[str]]:
    """Return the resolved task, its classes in the order of a fine-tuned checkpoint, and notes for the user.

    Raises:
        TrainerError: The labels of the training split do not fit the task or the checkpoint.
    """
    # Before `resolve`, which names classes in any case.
    chosen = bool(task.class_names)
    task = fitted(task.resolve(train.rows, train.where), preparation)
    converted = task.conversion_notes(train.rows.features)
    if preparation.labels is None:
        return task, converted
    ordered, notes = task.in_checkpoint_order(preparation.labels, chosen)
    return ordered, [*converted, *notes]


def fitted(task: Task, preparation: Preparation) -> Task:
    """Return a task with the parts of the model's configuration and folder that it needs.

    Raises:
        UsageError: the model does not fit the task.
    """
    folder = preparation.model_folder
    return (folder.completed(task) if folder else task).for_configuration(preparation.config)


def model_folder(recipe: Recipe) -> ModelFolder | None:
    """Return the parts of the recipe's task in the folder of its model; None: there are none.

    Raises:
        TrainerError: they do not fit the recipe, or cannot be read.
    """
    reader = recipe.task.folder_reader
    folder: ModelFolder | None = resolved(reader)(recipe) if reader else None
    return folder


def with_folder(task: Task, recipe: Recipe) -> Task:
    """Return a task with the modules of the model's folder, if it can be read; another check reports its problems."""
    with suppress(TrainerError):
        folder = model_folder(recipe)
        return folder.completed(task) if folder else task
    return task


ENCODED = "encoded.json"
"""The file that describes a folder of token ids; under the key `fit`, it has the facts of `encoding_facts`."""


def encoding_facts(recipe: Recipe, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the facts on which the token ids of texts depend, by their keys; a null length means whole texts."""
    is_whole = "packing" in type(recipe.task).model_fields  # such tasks cut rows of token ids as they cut texts
    length = None if is_whole else recipe.data.max_length
    return {
        "task.type": recipe.task.type,
        "data.max_length": length,
        "tokenizer": tokenizer_digest(tokenizer),
    }


@dataclass(frozen=True)
class TextPreparation(Preparation):
    """Tokenises texts, cut at `max_length` tokens, for a model with embeddings for `vocab_size` (None: any) tokens.

    It refuses a token without an embedding by name, because on a GPU such a token kills the process in a kernel.
    Batches are padded to a multiple of `pad_to` tokens.
    """

    tokenizer: Any
    max_length: int
    vocab_size: int | None = None
    labels: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()
    config: Any = None
    num_processes: int | None = None
    pad_to: int = 1
    model_folder: ModelFolder | None = None
    counts_tokens: bool = True
    _limits: tuple[Any, Any] = field(init=False)  # truncation and padding of the tokenizer, which its calls replace

    def __post_init__(self) -> None:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)  # None: it is slow
        # The dataclass is frozen.
        object.__setattr__(self, "_limits", (backend.truncation, backend.padding) if backend else (None, None))

    @property
    def text_tokenizer(self) -> Tokenizer:
        return self.tokenizer

    @property
    def padding_token(self) -> int:
        return self.batching.token_id

    @property
    def batching(self) -> Padding:
        padding = Padding.of(self.tokenizer, self.pad_to)
        self._require_embedding(padding.token_id)
        return padding

    def encode(self, split: Split, task: Task, cache: Path) -> EncodedSplit:
        assert isinstance(task, TextTask)
        encoded = encode_split(split, task, self.tokenizer, self.max_length, cache, self.num_processes)
        if len(encoded):
            self._check(task, split.where, encoded)
        return encoded

    def encoding(self, task: Task, first: EncodedSplit) -> RowEncoding:
        assert isinstance(task, TextTask)
        facts = {"tokenizer": tokenizer_digest(self.tokenizer), "max_length": self.max_length}
        packer, check = partial(task.packer, self.max_length), partial(self._check, task, "`data.train`")
        return RowEncoding(task, partial(self._prepare, task), packer, facts, check)

    def _prepare(self, task: TextTask, rows: Dataset, where: str, first_row: int) -> dict[str, list[Any]]:
        return task.encode(rows, self.tokenizer, self.max_length, where, first_row)

    def _check(self, task: TextTask, where: str, encoded: EncodedSplit) -> None:
        """Refuse encoded rows with tokens that the model does not have or cannot read."""
        # The largest id stands for all.
        self._require_embedding(int(encoded.tokens["input_ids"].max(initial=0)))
        if reads_end_tokens(self.config, task.auto_class_name):
            self._require_ends(encoded, where)
        if task.labels_are_tokens:  # target texts; an end token may be in the labels only
            labels = encoded.ragged["labels"].values if "labels" in encoded.ragged else encoded.tokens.get("labels")
            self._require_embedding(0 if labels is None else int(labels.max(initial=0)))

    def _require_ends(self, encoded: EncodedSplit, where: str) -> None:
        """Require equally many end tokens in all rows."""
        config = self.config
        # End tokens of each row; transformers takes the last of them, and fails if rows have different numbers.
        counts = np.add.reduceat(encoded.tokens["input_ids"] == config.eos_token_id, encoded.offsets[:-1], dtype=int)
        if not counts.all():
            row = int(counts.argmin())
            raise UsageError(
                f"`task.type` is a classification by a model of type {config.model_type}, which reads the end token of"
                f" id {config.eos_token_id}, but the tokenizer `{self.tokenizer.name_or_path}` adds none to row"
                f" {row + 1} of {where}; name the model's own tokenizer in `model.tokenizer`"
            )
        usual = int(np.bincount(counts).argmax())
        if (counts != usual).any():
            row = int((counts != usual).argmax())
            raise DataError(
                f"row {row + 1} of {where} must have {usual} end tokens, as other rows do, but has"
                f" {counts[row]}; remove {self.tokenizer.convert_ids_to_tokens(config.eos_token_id)!r} from its text"
            )

    def masking(self, task: Task, seed: int) -> TokenMasking | None:
        assert isinstance(task, TextTask)
        masking = task.masking(self.tokenizer, seed)
        if masking is not None:
            # Random tokens come from the whole vocabulary, so tokens that no row has count too.
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
        if backend := getattr(self.tokenizer, "backend_tokenizer", None):
            # Rows from the cache need no call, and the files must be the same.
            truncation, padding = self._limits
            backend.enable_truncation(**truncation) if truncation else backend.no_truncation()
            backend.enable_padding(**padding) if padding else backend.no_padding()
        # The package tokenizers raises no `OSError` for a full disk.
        with numbered_errors():
            self.tokenizer.save_pretrained(folder)
