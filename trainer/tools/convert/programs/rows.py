"""Data sets of programs around the Trainer: their files or names, and the columns of the task."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.tools.convert.draft import Draft
from trainer.tools.convert.examples import folder_or_name, moved
from trainer.tools.convert.foreign.values import Todo
from trainer.tools.convert.sources import Item

ENDINGS = (".json", ".jsonl", ".csv", ".parquet")

Columns = Mapping[str, Any]
"""From keys of the task, such as `messages`, to values as in `data.map.columns`."""


@dataclass(frozen=True)
class RowSet:
    """A data set: files, or a name on the hub.

    Attributes:
        files: paths of files, relative to the current folder; empty: it is on the hub.
        name: the name on the hub, or a folder that `datasets` can read.
        keys: further keys of the section `data` with values, such as `subset`.
        columns: the columns of the task.
    """

    files: tuple[str, ...] = ()
    name: str = ""
    keys: Mapping[str, str] = field(default_factory=dict)
    split: str = "train"
    columns: Columns = field(default_factory=dict)


def chat(column: str, role: str, content: str, roles: Mapping[str, str], system: str | None = None) -> Any:
    """Return the column of a chat, as in `data.map.columns`.

    Args:
        roles: the role of each name of the source; those with the same name may be left out.
    """
    other = {name: ours for name, ours in roles.items() if name != ours}
    keys = {"role": role, "content": content, "roles": other, "system": system}
    written = {key: value for key, value in keys.items() if value and value != key}
    return {"column": column, "chat": written} if written else column


def take_rows(
    draft: Draft,
    folder: os.PathLike[str],
    train: Sequence[RowSet],
    validation: Sequence[RowSet] | float | str | None,
    item: Item,
    *others: Item,
) -> None:
    """Propose the section `data` and the columns of the task.

    Args:
        folder: the folder of the recipe.
        validation: data sets, a share of the training rows, or a split of the same data set; None: there is none.
        item: the key that names the training rows.
        others: the keys that name the validation rows.
    """
    held = list(validation) if isinstance(validation, Sequence) and not isinstance(validation, str) else []
    kinds = {tuple(rows.columns) for rows in (*train, *held)}
    if len(kinds) > 1:
        shown = " and ".join(sorted(", ".join(kind) for kind in kinds))
        draft.refuse("data.train", f"one task reads all rows, but these have {shown}; give them one type", item)
        return
    _columns(draft, train, held, item, *others)
    if all(rows.files for rows in (*train, *held)):
        _files(draft, folder, train, held, item, *others)
    elif len(train) == 1:
        _hub(draft, folder, train[0], held, item, *others)
    else:
        text = "one data set of the hub, or files; write the rows of the others into files, and name all in data.train"
        draft.refuse("data.train", text, item)
    if isinstance(validation, float | str):
        draft.take("data.validation", validation, *others)
    elif not held:
        draft.take("data.validation", None, item)


def _columns(draft: Draft, train: Sequence[RowSet], held: Sequence[RowSet], *items: Item) -> None:
    """Propose the columns of the task: names of the source where they suffice, else a map."""
    first = train[0].columns
    alike = all(rows.columns == first for rows in (*train, *held))
    plain = all(isinstance(value, str) and "{" not in value for value in first.values())
    for key, column in first.items():
        name = key if not (alike and plain) else column
        draft.take(f"task.{key}", name, items[0])
    if alike and plain:
        return
    if alike:
        draft.take("data.map", {"columns": dict(first)}, items[0])
        return
    maps = [{"columns": dict(rows.columns)} for rows in train for _ in rows.files or ("",)]
    draft.take("data.maps", maps, items[0])
    if held:
        if any(rows.columns != held[0].columns for rows in held):
            draft.refuse(
                "data.validation", "one map reads all validation rows; give their files the same columns", *items
            )
        draft.take("data.map", {"columns": dict(held[0].columns)}, *items)


def _files(
    draft: Draft, folder: os.PathLike[str], train: Sequence[RowSet], held: Sequence[RowSet], item: Item, *others: Item
) -> None:
    draft.take("data.source", "files", item)
    for key, sets, items in (("train", train, (item,)), ("validation", held, others or (item,))):
        paths = [moved(path, folder) for rows in sets for path in rows.files]
        strange = [path for path in paths if not path.lower().removesuffix(".gz").endswith(ENDINGS)]
        if strange:
            text = f"{strange[0]} is not one of {', '.join(ENDINGS)}; write its rows as JSON Lines"
            draft.refuse(f"data.{key}", text, *items)
        elif paths:
            draft.take(f"data.{key}", paths[0] if len(paths) == 1 else paths, *items)


def _hub(
    draft: Draft, folder: os.PathLike[str], train: RowSet, held: Sequence[RowSet], item: Item, *others: Item
) -> None:
    if any((rows.name, rows.keys) != (train.name, train.keys) for rows in held) or len(held) > 1:
        draft.refuse("data.validation", "a split of the same data set; or write all rows into files", item, *others)
    elif held:
        draft.take("data.validation", held[0].split, *others)
    draft.take("data.source", "hub", item)
    draft.take("data.name", folder_or_name(train.name, folder), item)
    for key, value in train.keys.items():
        draft.take(f"data.{key}", value, item)
    if any(char in train.split for char in "[+"):
        draft.refuse("data.train", f"a part of a split, {train.split}; write its rows into a file", item)
    else:
        draft.take("data.train", train.split, item)


def held_share(draft: Draft, item: Item | None) -> float | None:
    """Return the share of rows to hold out; with a problem in the draft for a number of rows."""
    if item is None or not item.value:
        return None
    share = draft.number(item)
    if 0 < share < 1:
        return float(share)
    draft.refuse("data.validation", f"{share:g} rows; write their share of the training rows, such as 0.05", item)
    return None


def as_todo(draft: Draft, text: str, *items: Item) -> None:
    """Leave the columns of the rows to the user."""
    draft.take("data.map", Todo(text), *items)
