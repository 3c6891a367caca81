"""Notes for the user on the data of a run: rows that were cut or joined, positions, mixtures, and unknown tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from trainer.data.split import EncodedSplit
from trainer.models.configuration import rotary_positions
from trainer.recipe.schema import FileData, Recipe
from trainer.tasks.task import Task
from trainer.training.row_source import Shares

SplitsByName = Mapping[str, EncodedSplit]
"""`training`, and `validation` if there is one."""


def encoding_notes(splits: SplitsByName, max_length: int, unit: str, cut_targets: str) -> list[str]:
    """Return notes on rows cut to `max_length` tokens, targets that are cut, rows without text, and unknown tokens.

    Args:
        unit: the name of encoded rows; see `row_unit`.
        cut_targets: the text of the task about targets that are cut.
    """
    cut, targets, blank, unknown = [], [], [], []
    for name, split in splits.items():
        rows = f"of {len(split):,} {name} {unit}"
        if split.num_cut:
            cut.append(f"truncated to `data.max_length` ({max_length} tokens): {split.num_cut:,} {rows}")
        if split.num_cut_targets:
            targets.append(f"{cut_targets}: {split.num_cut_targets:,} {rows}")
        if split.num_blank:
            blank.append(f"special tokens only: {split.num_blank:,} {rows}, which have no text")
        if split.unknown_tokens is not None:
            number, tokens = split.unknown_tokens
            share = number / max(tokens, 1)
            unknown.append(f"{share:.2%} of {tokens:,} {name} tokens")
    joined = [f"unknown to the tokenizer: {', '.join(unknown)}"] if unknown else []
    return [*cut, *targets, *blank, *joined]


def row_unit(recipe: Recipe, task: Task, splits: SplitsByName, source_rows: Mapping[str, int]) -> str:
    """Return the name of encoded rows, which differ from those of the source if a split has another number of them."""
    if all(source_rows[name] == len(split) for name, split in splits.items()):
        return "rows"
    return "packed rows" if task.packer(recipe.data.max_length) else "windows"


def row_notes(recipe: Recipe, unit: str, splits: SplitsByName, source_rows: Mapping[str, int]) -> list[str]:
    """Return notes on splits with another number of rows than their sources, and on too few rows for a batch.

    `unit` is the result of `row_unit`.
    """
    length, size = recipe.data.max_length, recipe.training.global_batch_size
    notes = []
    if size > (rows := len(splits["training"])):
        notes.append(f"`training.global_batch_size` is {size}, but a step has at most the {rows:,} rows of an epoch")
    return notes + [
        f"{source_rows[name]:,} {name} rows became {len(split):,} {unit} of at most {length} tokens"
        for name, split in splits.items()
        if source_rows[name] != len(split)
    ]


def position_notes(config: Any, splits: SplitsByName) -> list[str]:
    """Return a note on each split with later positions than those of a model with rotary positions."""
    positions = rotary_positions(config)
    notes = []
    for name, split in splits.items():
        if positions is None or not len(split):
            continue
        packed = split.tokens.get("position_ids")  # of packed documents
        longest = int(split.lengths.max()) if packed is None else int(packed.max()) + 1
        if longest > positions:
            notes.append(
                f"{name} rows have up to {longest} tokens, more than the {positions} positions of the model"
                " (`max_position_embeddings`), beyond which its quality suffers; lower `data.max_length`, or scale the"
                " positions by `model.config.rope_parameters`"
            )
    return notes


def mixture_notes(recipe: Recipe, mixture: Shares | None) -> list[str]:
    """Return a note on the share of each source in an epoch, or on a check that does not count the rows of sources."""
    if recipe.data.source_weights is None:
        return []
    if mixture is None:
        return [
            "mixture: this check read only a part of the rows, so the run finds weights that are too small at its start"
        ]
    assert isinstance(recipe.data, FileData)
    return [
        f"mixture: {count:,} of the {mixture.num_rows:,} rows of an epoch are of `{entry}`, which has {size:,}:"
        f" {count / size:.2f} passes"
        for entry, count, size in zip(recipe.data.train, mixture.counts, mixture.sizes, strict=True)
    ]


def class_counts(task: Task, split: EncodedSplit) -> tuple[tuple[str, int], ...]:
    """Return the name of each class and its number of rows; empty if rows have no single class."""
    names = task.model_options().get("id2label")
    if names is None or "labels" not in split.scalars:
        return ()
    counts = np.bincount(split.scalars["labels"], minlength=len(names))
    return tuple((str(names[index]), int(count)) for index, count in enumerate(counts))
