"""Functions of tasks on text columns: column checks, tokenisation, and names of cells in messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

from trainer.base.errors import DataError, UsageError
from trainer.base.nulls import given, item_of
from trainer.base.text import blanks_hint, listed, number_in
from trainer.tasks.types import Dataset, Encoded, Tokenizer

NAMES_SHOWN = 10
"""The names of classes in a message."""

STRING_TYPES = ("string", "large_string")
SEVERAL_TYPES, EMPTY_LISTS = "values of several types", "empty lists only"
_FIXES = {
    SEVERAL_TYPES: "; write all as texts, or all as numbers",
    EMPTY_LISTS: "; fill them, or name another column",
    "null": "; fill it, or name another column",
}

# The largest finite number of IEEE 754 binary32; labels are stored in this type.
_LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127


def require_columns(features: Mapping[str, Any], names: Sequence[str], key: str, where: str, fix: str = "") -> None:
    """Require that a split has the columns `names`, which the recipe's `key` selects; `fix` ends the message."""
    for name in names:
        if name not in features:
            parts = [part.strip() for part in name.strip("[]").split(",")]
            several = f"; several columns are a list: {json.dumps(parts)}" if features.keys() >= {*parts} else ""
            raise DataError(
                f"`{key}` names the column `{name}`, but {where} has none of that name; its columns are"
                f" {', '.join(f'`{column}`' for column in features)}{blanks_hint(name, features)}{several}{fix}"
            )


def require_kind(
    features: Mapping[str, Any], name: str, key: str, where: str, is_right: Callable[[Any], bool], needed: str
) -> None:
    """Require a column for which `is_right` is true; `needed` describes such columns for the message."""
    require_columns(features, [name], key, where)
    if not is_right(features[name]):
        kind = type_name(features[name])
        raise DataError(f"`{key}` must name {needed}, but column `{name}` of {where} holds {kind}{fix_of(kind)}")


def fix_of(kind: str) -> str:
    """Return the end of a message on a column of a kind that is not read; empty without advice."""
    return _FIXES.get(kind, "")


def require_text(features: Mapping[str, Any], names: Sequence[str], where: str, key: str = "task.text") -> None:
    """Require that a split has the columns `names`, which the recipe's `key` selects, and that they hold strings."""
    require_columns(features, names, key, where)
    for name in names:
        needed = "columns of strings" if key in ("task.text", "task.texts") else "a column of strings"
        require_kind(features, name, key, where, is_text, needed)


def is_text(feature: Any) -> bool:
    """Return whether a column, or the inside of a column of lists, holds strings."""
    return getattr(feature, "dtype", None) in STRING_TYPES


def type_name(feature: Any) -> str:
    """Return the type of a column for a message: `int64`, `string`, `List(...)`."""
    kind = type(feature).__name__
    if getattr(item_of(feature), "dtype", None) == "null":
        return EMPTY_LISTS
    return SEVERAL_TYPES if kind == "Json" else str(feature.dtype if kind == "Value" else feature)


def cell(column: str, row: int, where: str) -> str:
    """Return the name of one cell for a message; `row` counts from 0, the message from 1."""
    return f"column `{column}`, row {row + 1} of {where}"


def filled(rows: Dataset, column: str, where: str, first_row: int, fix: str) -> list[Any]:
    """Return the values of a column without nulls; `fix` ends the message.

    Raises:
        DataError: a value is null.
    """
    values = list(rows[column])
    if None in values:
        raise DataError(f"{cell(column, first_row + values.index(None), where)} is null; {fix}")
    return values


def cells_of(
    rows: Dataset, columns: Sequence[str], where: str, first_row: int, nullable: str | None = None
) -> dict[str, list[Any]]:
    """Return the values of columns by name, without the nulls that Arrow writes for keys that an object lacks.

    Raises:
        DataError: a value of a column other than `nullable` is null.
    """
    cells, features = {}, rows.features  # a copy of all columns
    fix = "fill it, or leave the row out"
    for column in columns:
        values = rows[column] if column == nullable else filled(rows, column, where, first_row, fix)
        cells[column] = given(values, [features[column]])
    return cells


def tokenise(
    rows: Dataset,
    columns: Sequence[str],
    tokenizer: Tokenizer,
    max_length: int,
    where: str,
    first_row: int,
    prefix: str = "",
) -> Encoded:
    """Tokenise one text column, or two as pairs, and truncate rows to `max_length` tokens.

    `prefix` comes before each text of the first column.

    Returns:
        The tokenizer's columns without the attention mask, which is 1 for every token of an unpadded row. The column
        `cut` is True for rows that were longer than `max_length`.

    Raises:
        DataError: a text is null or has no token.
        UsageError: `max_length` allows only the special tokens.
    """
    texts = [filled(rows, column, where, first_row, "every row needs a text") for column in columns]
    if prefix:
        texts[0] = [prefix + text for text in bare(texts[0], tokenizer, *frame_of(tokenizer))]
    features = tokenise_texts(texts, tokenizer, max_length)
    if [] in features["input_ids"]:
        row = first_row + features["input_ids"].index([])
        raise DataError(f"{cell(columns[0], row, where)} is a text without a token; leave the row out")
    return features


def frame_of(tokenizer: Tokenizer, is_target: bool = False) -> tuple[list[int], list[int]]:
    """Return the tokens that a tokenizer adds before a text, and those that it adds behind it.

    Args:
        is_target: whether the text is a target of an encoder-decoder.
    """
    key = "text_target" if is_target else "text"
    # An empty text would show the added tokens, but not how many of them come before a text.
    texts: list[dict[str, Any]] = [{key: "a", "add_special_tokens": added, "verbose": False} for added in (True, False)]
    ids, plain = (list(tokenizer(**keys)["input_ids"]) for keys in texts)
    places = range(len(ids) - len(plain) + 1)
    at = next((place for place in places if plain and ids[place : place + len(plain)] == plain), 0)
    return ids[:at], ids[at + len(plain) :] if plain else []


def framed(texts: Sequence[str], tokenizer: Tokenizer, end: int | None = None) -> list[list[int]]:
    """Return the tokens of texts, with those that the tokenizer adds, and with an end token, once each.

    Args:
        end: the token behind the texts; None: no tokens are added there, since prompts continue.
    """
    start, behind = frame_of(tokenizer)
    behind = [] if end is None else behind if behind[-1:] == [end] else [*behind, end]
    bare_texts = bare(texts, tokenizer, start, behind)
    tokenised = tokenizer(bare_texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    return [[*start, *ids, *behind] for ids in tokenised]


def bare(texts: Sequence[str], tokenizer: Tokenizer, start: Sequence[int], end: Sequence[int]) -> list[str]:
    """Return texts without special tokens at their start and end that are added anyway, nor blanks around these."""
    known = tokenizer.added_tokens_decoder
    before, behind = ([str(known[token]) for token in tokens if token in known] for tokens in (start, end))
    stripped = []
    for text in texts:
        for token in before:
            text = rest[len(token) :] if (rest := text.lstrip()).startswith(token) else text
        # The last of these tokens is the first to find at the end of a text.
        for token in reversed(behind):
            text = rest[: -len(token)] if (rest := text.rstrip()).endswith(token) else text
        stripped.append(text)
    return stripped


def tokenise_texts(texts: Sequence[list[str]], tokenizer: Tokenizer, max_length: int) -> Encoded:
    """Tokenise lists of texts, or two lists as pairs; the result is that of `tokenise`.

    A text that begins with the start token, or ends with the end token, gets no second one.

    Raises:
        UsageError: `max_length` allows only the special tokens.
    """
    num_special = tokenizer.num_special_tokens_to_add(pair=len(texts) == 2)
    if max_length <= num_special:  # the tokenizer would not truncate at all
        raise UsageError(
            f"`data.max_length` must be more than the {num_special} special tokens, but is {max_length}; raise it"
        )
    start, end = frame_of(tokenizer)
    columns = [bare(column, tokenizer, start, end) for column in texts]
    features = tokenizer(*columns, truncation=True, max_length=max_length, return_attention_mask=False)
    at_limit = [row for row, ids in enumerate(features["input_ids"]) if len(ids) == max_length]
    cut = [False] * len(columns[0])
    # A row of exactly `max_length` tokens may be truncated or complete; to tokenise it again would double the time.
    if features.encodings:
        for row in at_limit:
            cut[row] = bool(features.encodings[row].overflowing)
    elif at_limit:  # the tokenizer is slow
        whole = tokenizer(*[[values[row] for row in at_limit] for values in columns], verbose=False)
        for row, ids in zip(at_limit, whole["input_ids"], strict=True):
            cut[row] = len(ids) > max_length
    return {**features, "cut": cut}


def finite_number(value: Any) -> float | None:
    """Return `value` as a float, or None if it is not a finite float32; a text may be a number, a boolean is none."""
    number = number_in(value) if isinstance(value, str) else value
    # Not written with `>`, because every comparison with NaN is false.
    if isinstance(number, bool) or not isinstance(number, int | float) or not abs(number) <= _LARGEST_FLOAT32:
        return None
    return float(number)


def finite_numbers(rows: Dataset, column: str, where: str, first_row: int, largest: float = inf) -> list[float]:
    """Return the number of each row, which may be at most `largest` and at least its opposite.

    Raises:
        DataError: a value is no such number.
    """
    numbers = []
    for place, value in enumerate(rows[column]):
        number = finite_number(value)
        if number is None or abs(number) > largest:
            needed = "a finite number" if largest == inf else f"a number from -{largest:g} to {largest:g}"
            shown = "null" if value is None else repr(value)
            if isinstance(value, str) and number_in(value.replace(",", ".", 1)) is not None:
                shown += "; write it with a decimal point"
            raise DataError(f"{cell(column, first_row + place, where)} must be {needed}, but is {shown}")
        numbers.append(number)
    return numbers


def dtype_in_list(feature: Any) -> str | None:
    """Return the type in a column of lists; None for other columns."""
    if type(feature).__name__ not in ("List", "LargeList"):
        return None
    return str(getattr(feature.feature, "dtype", ""))


def shown(values: Sequence[Any]) -> str:
    """Return the first of the values as a list in a message."""
    return listed(values, NAMES_SHOWN)
