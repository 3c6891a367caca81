"""The map of a source, applied to its rows in memory or in a file of the cache of `datasets`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from trainer.base.digests import digest_of, file_digest
from trainer.base.errors import DataError
from trainer.data.formats.base import or_again
from trainer.data.hashing import hash_rows
from trainer.features.data_map import row_map, texts
from trainer.features.data_map.row_map import RowMap

if TYPE_CHECKING:
    from datasets import Dataset

_AT_ONCE = 1000
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

    def of_whole(
        self, rows: Dataset, conditions: Sequence[str], where: str
    ) -> tuple[Dataset, NDArray[np.int64] | None, list[str]]:
        """See `RowTransform.whole`."""
        notes, chosen = list(self.notes), None
        if self.conditions:
            chosen, key = _chosen(self, rows, where), f"{self.key}.where"
            notes.append(f"{len(rows) - len(chosen):,} of {len(rows):,} rows of {where} are left out by `{key}`")
            if not len(chosen):
                wrong = f"no row of {where} fulfils {conditions}"
                raise DataError(f"`{key}` must keep a row, but {wrong}; change it")
            if len(chosen) == len(rows):
                chosen = None
            else:
                rows = rows.select(chosen)
        return _with_columns(self, rows, chosen, where), chosen, notes


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
