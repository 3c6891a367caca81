"""Tokenised splits: a split is tokenised once; ranks and concurrent runs share the result.

The cache of `Dataset.map` is not used: its key depends on a pickle of the function, and its writers race.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
import tokenizers
from numpy.typing import NDArray

from trainer.base.digests import digest_of, file_digest
from trainer.base.errors import DataError, UsageError
from trainer.data.cache import EntryWriter, entry_key, open_or_write
from trainer.data.encoding import RowPacker, write_split
from trainer.data.hashing import hash_rows
from trainer.data.sources import Split
from trainer.data.split import Encoded, EncodedSplit, Encoder, FlatArray
from trainer.ranks.environment import available_cores

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

_ROWS_AT_ONCE, _BYTES_AT_ONCE = 1000, 4 << 20
_BYTES_PER_PROCESS = 16 << 20  # less text is tokenised before a further process pays
_TOKENS_AT_ONCE = 1 << 22
_MOST_SPECIAL = 4  # tokens that tokenizers add to a text or a pair, such as `<s></s></s></s>`
_PLACE_AND_CALLS = {
    "name_or_path", "is_local", "local_files_only", "init_kwargs", "cache", "deprecation_warnings", "verbose"
}  # fmt: skip
MOST_UNKNOWN = 0.5
"""A share of the tokens; a larger share of unknown ones means the wrong tokenizer."""


class RowEncoder(Encoder, Protocol):
    """The part of `trainer.tasks.task.TextTask` that this package uses."""

    def for_split(self, rows: Dataset, first_row: int) -> Self: ...

    def packer(self, max_length: int) -> RowPacker | None: ...

    def encode(
        self, rows: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int, where: str, first_row: int
    ) -> Encoded: ...


def encode_split(
    split: Split,
    encoder: RowEncoder,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    cache: Path,
    num_processes: int | None = None,
) -> EncodedSplit:
    """Return the tokenised split; read it from the cache or write it there.

    Any number of processes may call this function at once: one tokenises the split, and the others wait.

    Args:
        num_processes: the number of processes that tokenise, which does not change the result; None: as many as there
            are cores, and fewer for little text.

    Raises:
        DataError: a column is missing, a value is not valid, or most tokens of a whole split are unknown.
        TrainerError: a process died.
        UsageError: `max_length` does not fit the tokenizer, or the cache cannot be written.
    """
    if max_length > tokenizer.model_max_length:
        raise UsageError(
            f"`data.max_length` must be at most the {tokenizer.model_max_length} tokens that the tokenizer allows for"
            f" its model, but is {max_length}; lower it"
        )
    encoder.check_columns(split.rows.features, split.where)
    rows = split.rows.select_columns(list(encoder.columns))

    at_once, processes = _sizes(rows, num_processes)

    def write(writer: EntryWriter) -> None:
        task, packer = encoder.for_split(rows, split.first_row), encoder.packer(max_length)

        def encode(rows: Dataset, first_row: int) -> Encoded:
            return task.encode(rows, tokenizer, max_length, split.where, split.first_row + first_row)

        write_split(writer, split, rows, encode, at_once, processes, packer, split.sources)

    key = entry_key(
        encoder,
        rows=hash_rows(rows),
        sources=split.sources,
        tokenizer=tokenizer_digest(tokenizer),
        max_length=max_length,
    )
    return _checked(open_or_write(cache, key, write, encoder.own_lengths), split, tokenizer)


def _checked(encoded: EncodedSplit, split: Split, tokenizer: PreTrainedTokenizerBase) -> EncodedSplit:
    """Return an encoded split with the numbers of its unknown tokens and blank rows.

    Raises:
        DataError: a whole split has no text with a token, or most tokens are unknown.
    """
    if not len(encoded):
        if split.is_part:
            return encoded
        raise DataError(f"{split.where} must hold a text with a token, but has none; name another column")
    unknown = _count_unknown(encoded.tokens["input_ids"], tokenizer)
    if split.is_part:
        return replace(encoded, unknown_tokens=unknown)
    num_blank = _count_blank(encoded, tokenizer)
    if num_blank == len(encoded):
        raise DataError(
            f"{split.where} must hold a text with a token, but has special tokens only; name another column"
        )
    if unknown[0] > MOST_UNKNOWN * unknown[1]:
        raise DataError(
            f"{split.where} has {unknown[0]:,} tokens of {unknown[1]:,} that are unknown to the tokenizer"
            f" `{tokenizer.name_or_path}`; use a model for this language, or name the model's own in `model.tokenizer`"
        )
    return replace(encoded, unknown_tokens=unknown, num_blank=num_blank)


def _count_blank(encoded: EncodedSplit, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of rows with special tokens only, except the unknown token."""
    # The unknown token stands for text, so a row of it is not blank.
    special = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    ids, ends = encoded.tokens["input_ids"], encoded.offsets[:: encoded.texts_per_row]
    short = np.flatnonzero(np.diff(ends) <= _MOST_SPECIAL * encoded.texts_per_row)
    return sum(special.issuperset(ids[ends[row] : ends[row + 1]].tolist()) for row in short)


def _sizes(rows: Dataset, num_processes: int | None) -> tuple[int, int]:
    """Return the number of rows that are tokenised together, which bounds the memory, and the number of processes."""
    row_bytes = rows.data.nbytes / max(1, rows.data.num_rows)
    at_once = int(min(_ROWS_AT_ONCE, max(1, _BYTES_AT_ONCE // max(1, row_bytes))))
    if num_processes is None:
        num_processes = min(available_cores(), int(row_bytes * len(rows)) // _BYTES_PER_PROCESS)
    return at_once, num_processes


def _count_unknown(ids: FlatArray, tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """Return the number of unknown tokens, and the number of tokens that are unknown or not special.

    Args:
        ids: the token ids, of shape `[all tokens]`.
    """
    unknown = tokenizer.unk_token_id
    counts: NDArray[np.int64] = np.zeros(0, np.int64)
    for start in range(0, len(ids), _TOKENS_AT_ONCE):  # in parts: the mapped ids may exceed the memory
        part = np.bincount(ids[start : start + _TOKENS_AT_ONCE], minlength=len(counts))
        part[: len(counts)] += counts
        counts = part
    special = [token for token in set(tokenizer.all_special_ids) - {unknown} if token < len(counts)]
    num_unknown = int(counts[unknown]) if unknown is not None and unknown < len(counts) else 0
    return num_unknown, int(counts.sum() - counts[special].sum())


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest of everything that a tokenizer holds, except for its place and its state of earlier calls."""
    # The state of a pickle, so that no attribute that changes the tokens is missed.
    state: dict[str, Any] = tokenizer.__reduce_ex__(4)[2]
    files = {*tokenizer.vocab_files_names, "tokenizer_file"}

    def kept(values: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: file_digest(Path(value)) if name in files and value and Path(value).is_file() else value
            for name, value in values.items()
            if name not in _PLACE_AND_CALLS
        }

    facts = [type(tokenizer), kept(state), kept(state.get("init_kwargs", {}))]
    return digest_of(facts, {tokenizers.Tokenizer: _without_calls})


def _without_calls(backend: tokenizers.Tokenizer) -> str:
    """Return a fast tokenizer as JSON, without the truncation and padding of earlier calls."""
    content = json.loads(backend.to_str())
    return json.dumps({name: value for name, value in content.items() if name not in ("truncation", "padding")})
