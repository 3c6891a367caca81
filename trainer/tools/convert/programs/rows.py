"""Data sets of programs around the Trainer: their files or names, and the columns of the task."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.tools.convert.draft import Draft, Outcome
from trainer.tools.convert.examples import TABLES, folder_or_name, moved
from trainer.tools.convert.sources import Item

_BUILDERS = ("json", "csv", "parquet")  # of `datasets`

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

    @property
    def is_part(self) -> bool:
        """Whether it is a part of a split, such as `train[:5%]`, or several splits."""
        return any(char in self.split for char in "[+")


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
    *others: Item | None,
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
    if len(train) == 1 and not train[0].files and not _is_apart(train[0], held):
        _hub(draft, folder, train[0], held, item, *others)
    else:
        _files(draft, folder, train, held, item, *others)
    if isinstance(validation, float | str):
        draft.take("data.validation", validation, *others)
    elif not held:
        draft.take("data.validation", None, item)


def _columns(draft: Draft, train: Sequence[RowSet], held: Sequence[RowSet], *items: Item | None) -> None:
    """Propose the columns of the task: names of the source where they suffice, else a map."""
    first = train[0].columns
    alike = all(rows.columns == first for rows in (*train, *held))
    plain = alike and all(isinstance(value, str) and "{" not in value for value in first.values())
    for key, column in first.items():
        draft.take(f"task.{key}", column if plain else key, items[0])
    if alike and not plain:
        draft.take("data.map", {"columns": dict(first)}, items[0])
    elif not alike:
        maps = [{"columns": dict(rows.columns)} for rows in train for _ in rows.files or ("",)]
        draft.take("data.maps", maps, items[0])
        _map_of_held(draft, held, *items)


def _map_of_held(draft: Draft, held: Sequence[RowSet], *items: Item | None) -> None:
    if any(rows.columns != held[0].columns for rows in held):
        text = "one map reads all validation rows; give their files the same columns"
        draft.refuse("data.validation", text, *items)
    if held:
        draft.take("data.map", {"columns": dict(held[0].columns)}, *items)


def _files(
    draft: Draft, folder: os.PathLike[str], train: Sequence[RowSet], held: Sequence[RowSet], *items: Item | None
) -> None:
    draft.take("data.source", "files", items[0])
    for key, sets, named in (("train", train, items[:1]), ("validation", held, items[1:])):
        paths = [moved(path, folder) for rows in sets for path in _written(draft, rows, next(iter(named), None))]
        strange = [path for path in paths if not is_table(path)]
        if strange:
            text = f"{strange[0]} is not one of {', '.join(TABLES)}; write its rows as JSON Lines"
            draft.refuse(f"data.{key}", text, *named)
        elif paths:
            draft.take(f"data.{key}", paths[0] if len(paths) == 1 else paths, *named)


def _is_apart(train: RowSet, held: Sequence[RowSet]) -> bool:
    """Return whether `data.name` cannot name the rows: a part of a split, or another data set to validate on."""
    others = any((rows.name, rows.keys) != (train.name, train.keys) for rows in held) or len(held) > 1
    return others or any(rows.is_part for rows in (train, *held))


def _hub(
    draft: Draft, folder: os.PathLike[str], train: RowSet, held: Sequence[RowSet], item: Item, *others: Item | None
) -> None:
    draft.take("data.source", "hub", item)
    draft.take("data.name", folder_or_name(train.name, folder), item)
    for key, value in train.keys.items():
        draft.take(f"data.{key}", value, item)
    draft.take("data.train", train.split, item)
    if held:
        draft.take("data.validation", held[0].split, *others)


def _written(draft: Draft, rows: RowSet, item: Item | None) -> tuple[str, ...]:
    """Return the files of a data set; those of the hub and of parts are left to the user, with the command for each."""
    if rows.files and not rows.is_part:
        return rows.files
    place = os.path.splitext(rows.files[0].removesuffix(".gz")) if rows.files else (rows.name, "")
    parts = [*place[0].strip("./").split("/"), *rows.keys.values(), *re.findall(r"\w+", rows.split)]
    file = f"{'--'.join(parts)}.parquet"
    options: dict[str, Any] = {"name": rows.keys.get("subset"), "revision": rows.keys.get("revision")}
    options |= {"data_files": list(rows.files), "split": rows.split}
    loader = place[1].lower().strip(".l") if rows.files else rows.name  # JSON Lines are read by `json`
    further = "".join(f", {key}={json.dumps(value)}" for key, value in options.items() if value)
    code = f"load_dataset({json.dumps(loader)}{further}).to_parquet({json.dumps(file)})"
    if item is not None:
        command = shlex.join(["python", "-c", f"from datasets import load_dataset; {code}"])
        text = "`data` names one data set of the hub, or files; write these rows into a file"
        draft.note(item, Outcome.TODO, f"{text}: {command}")
    return (file,)


def held_share(draft: Draft, item: Item | None) -> float | None:
    """Return the share of rows to hold out; with a problem in the draft for a number of rows."""
    if item is None or not item.value:
        return None
    share = draft.number(item)
    if 0 < share < 1:
        return float(share)
    draft.refuse("data.validation", f"{share:g} rows; write their share of the training rows, such as 0.05", item)
    return None


def take_train_and_held(
    draft: Draft,
    folder: os.PathLike[str],
    train: Sequence[RowSet],
    held: Sequence[RowSet] | None,
    item: Item,
    tests: Item | None,
    share: Item | None,
) -> None:
    """Propose the rows of two keys; without the key `tests` of the validation rows, a share is held out."""
    if tests is not None:
        draft.unread(f"{tests.name} has precedence", share)
        take_rows(draft, folder, train, held, item, tests)
    else:
        take_rows(draft, folder, train, held_share(draft, share), item, share)


def entries(draft: Draft, item: Item) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the data sets of a list with their places in it; an empty list after a problem."""
    if not isinstance(item.value, list) or not all(isinstance(entry, dict) for entry in item.value):
        draft.problem(item, "must be a list of data sets; begin each with `- path:`")
        return []
    return [(f"{item.key}[{place}]", entry) for place, entry in enumerate(item.value)]


def row_set(draft: Draft, item: Item, entry: Mapping[str, Any], place: str) -> RowSet | None:
    """Return the data set of an entry with keys of `datasets.load_dataset`, without columns; None after a problem."""
    path, files, kind = entry.get("path"), entry.get("data_files") or [], entry.get("ds_type")
    if not isinstance(path, str) or not path:
        draft.problem(item, f"has no path in {place}; write it")
        return None
    named = [files] if isinstance(files, str) else [str(file) for file in files]
    found = _local_files(path, named)
    split = str(entry.get("split") or "train")
    if found:
        return RowSet(tuple(found), split=split)
    if named:
        draft.refuse("data.train", f"single files of a hub repository, {', '.join(named)}; download them", item)
        return None
    if kind and kind not in _BUILDERS:
        draft.refuse("data.train", f"{path} of the type {kind}; write its rows as JSON Lines", item)
        return None
    keys = {"name": "subset", "revision": "revision"}
    return RowSet((), path, {ours: str(entry[theirs]) for theirs, ours in keys.items() if entry.get(theirs)}, split)


def _local_files(path: str, named: Sequence[str]) -> list[str]:
    if os.path.isdir(path):
        return [os.path.join(path, file) for file in named]
    if is_table(path) or os.path.isfile(path):
        return [path]
    return list(named) if path in (*_BUILDERS, "text") else []


def is_table(path: str) -> bool:
    """Return whether the name of a file is that of a table of rows."""
    return path.lower().removesuffix(".gz").endswith(TABLES)
