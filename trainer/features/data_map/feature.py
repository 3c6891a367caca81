"""The rows of files, folders and hub data sets as `data.map` makes them, in memory or mapped from a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from trainer.base.digests import digest_of, file_digest
from trainer.base.errors import DataError
from trainer.base.nulls import item_of
from trainer.data.formats.base import CellKind, Row, or_again
from trainer.data.hashing import hash_rows
from trainer.data.row_transform import RowTransform
from trainer.features.data_map import row_map, texts
from trainer.features.data_map.row_map import RowMap, fix_of_row, kinds_of_sources
from trainer.features.data_map.section import DataMap, map_of, maps_of
from trainer.recipe.schema import Data, FileData

if TYPE_CHECKING:
    from datasets import Dataset

_AT_ONCE, _FIRST = 1000, 20
_IN_MEMORY_BYTES = 1 << 26


class SourceMap(RowMap):
    """The map of a source; see `SourceTransform`."""

    @property
    def drops_rows(self) -> bool:
        return bool(self.conditions)

    @property
    def facts(self) -> object:
        return self.columns, self.conditions, self.keeps_others

    def reads(self, wanted: Sequence[str]) -> tuple[str, ...]:
        kept = [name for name in wanted if name not in self.columns] if self.keeps_others else []
        return tuple(dict.fromkeys([*self.sources, *(condition.column for condition in self.conditions), *kept]))

    def of_table(self, rows: Dataset, first_row: int, where: str) -> Dataset:
        numbers = np.arange(first_row, first_row + len(rows))
        if self.conditions:
            numbers = _chosen(self, rows, where, first_row) + first_row
            rows = rows.select(numbers - first_row)
        return _with_columns(self, rows, numbers, where) if len(rows) else rows


@dataclass(frozen=True)
class DataTransform(RowTransform):
    """A map of a recipe, or of an entry of `data.train`, under its key."""

    section: DataMap
    key: str = "data.map"

    @classmethod
    def of(cls, data: Data) -> DataTransform:
        return cls(map_of(data))

    @classmethod
    def of_entries(cls, data: FileData) -> Sequence[DataTransform] | None:
        maps = maps_of(data)
        return None if maps is None else [cls(one, f"data.maps[{place}]") for place, one in enumerate(maps)]

    @property
    def facts(self) -> object:
        return self.section.model_dump(mode="json")

    def kinds(self, kinds: Mapping[str, CellKind]) -> dict[str, CellKind]:
        return kinds_of_sources(self.section, kinds)

    def of_source(self, rows: Dataset, wanted: Sequence[str], where: str) -> SourceMap | None:
        return SourceMap.of(self.section, wanted, _first_values(rows), where, self.key)

    def of_input(self, rows: Sequence[Row], wanted: Sequence[str], where: str) -> SourceMap | None:
        return SourceMap.of_input(self.section, wanted, rows, where)

    def whole(
        self, rows: Dataset, wanted: Sequence[str], where: str
    ) -> tuple[Dataset, NDArray[np.int64] | None, list[str]]:
        found = self.of_source(rows, wanted, where)
        if found is None:
            return rows, None, []
        notes, chosen = list(found.notes), None
        if found.conditions:
            chosen, key = _chosen(found, rows, where), f"{self.key}.where"
            notes.append(f"{len(rows) - len(chosen):,} of {len(rows):,} rows of {where} are left out by `{key}`")
            if not len(chosen):
                wrong = f"no row of {where} fulfils {self.section.where}"
                raise DataError(f"`{key}` must keep a row, but {wrong}; change it")
            if len(chosen) == len(rows):
                chosen = None
            else:
                rows = rows.select(chosen)
        return _with_columns(found, rows, chosen, where), chosen, notes

    def fix(self, column: str, value: Any) -> str | None:
        return fix_of_row(self.section, column, value) if self.key == "data.map" else None


def _first_values(rows: Dataset) -> dict[str, Sequence[Any]]:
    """Return the columns, with the first values of those that may hold chats."""

    def may_hold(feature: Any) -> bool:
        return isinstance(feature, dict) or type(feature).__name__ == "Json"

    features = rows.features  # a copy of all columns at each call
    items = {name: item_of(feature) for name, feature in features.items()}
    chats = [
        name
        for name, item in items.items()
        if may_hold(features[name]) or may_hold(item) or item_of(item) is not None  # the last: lists of turns
    ]
    # Only columns that may hold chats are read: others may be images, which would be decoded.
    first = rows.select_columns(chats)[:_FIRST] if chats else {}
    return {name: first.get(name, ()) for name in features}


def _chosen(found: RowMap, rows: Dataset, where: str, first_row: int = 0) -> NDArray[np.int64]:
    columns = list(dict.fromkeys(condition.column for condition in found.conditions))
    chosen: list[int] = []
    for start, batch in zip(range(0, len(rows), _AT_ONCE), rows.select_columns(columns).iter(_AT_ONCE), strict=True):
        numbers = range(first_row + start, first_row + min(start + _AT_ONCE, len(rows)))
        chosen.extend(start + place for place in found.keeps(batch, numbers, where))
    return np.array(chosen, np.int64)


def _with_columns(found: RowMap, rows: Dataset, chosen: NDArray[np.int64] | None, where: str) -> Dataset:
    """Return the rows with the mapped columns; columns that only change their names are not copied."""
    import datasets

    kept = list(filter(found.keeps_column, rows.column_names))
    names, made, parts = {**dict.fromkeys(kept), **found.renamed}, found.made, []
    # Each pass renames a column once; a second new name of it waits for the next pass.
    while names:  # a column of the source may have several new names
        sources = {source or name: name for name, source in names.items()}
        parts.append(rows.select_columns(list(sources)).rename_columns(sources))
        names = {name: source for name, source in names.items() if name not in sources.values()}
    if made.columns:
        parts.append(_made(made, rows.select_columns(list(made.sources)), chosen, where))
    return parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts, axis=1)


def _made(made: RowMap, rows: Dataset, chosen: NDArray[np.int64] | None, where: str) -> Dataset:
    import datasets

    features = rows.features

    def convert(batch: dict[str, list[Any]], places: list[int]) -> dict[str, Sequence[Any]]:
        numbers = places if chosen is None else chosen[places].tolist()
        return made(batch, numbers, where, features)

    def write(**options: Any) -> Dataset:
        return rows.map(
            convert,
            batched=True,
            with_indices=True,
            batch_size=_AT_ONCE,
            remove_columns=rows.column_names,
            features=datasets.Features(made.features(features)),
            **options,
        )

    # Small tables need no file. A fingerprint is given, because `datasets` would hash the function by its pickle.
    if rows.data.nbytes <= _IN_MEMORY_BYTES:
        return write(keep_in_memory=True, new_fingerprint=digest_of(where))
    # A changed version of the map must not read files of an older one.
    code = [file_digest(Path(str(module.__file__))) for module in (row_map, texts)]
    columns = {name: mapped if isinstance(mapped, str) else repr(mapped) for name, mapped in made.columns.items()}
    key = digest_of([columns, hash_rows(rows), code])
    folder = Path(datasets.config.HF_DATASETS_CACHE)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"trainer-map-{key}.arrow"
    with FileLock(f"{file}.lock"):  # ranks of a host share the file
        options = {"cache_file_name": str(file), "new_fingerprint": key}
        return or_again(lambda: write(**options), lambda: write(**options, load_from_cache_file=False))
