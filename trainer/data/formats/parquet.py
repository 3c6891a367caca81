"""The reader of Parquet."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.base.errors import DataError
from trainer.base.text import listed
from trainer.data.formats.base import (
    Files,
    Loaded,
    Reader,
    Row,
    TextOptions,
    leaves,
    load_with_datasets,
    reason,
    require_own_names,
)

if TYPE_CHECKING:
    import pyarrow
    from datasets import Features

_ROWS_AT_ONCE = 1000
_UNREAD_SHOWN = 6


class ParquetReader(Reader):
    """Parquet."""

    is_text = False

    def load(self, files: Files) -> Loaded:
        """See `Reader`; columns of types that `datasets` lacks are left out, with a note."""
        import datasets
        import pyarrow.parquet

        for path in files.paths:
            schema = pyarrow.parquet.read_schema(path)
            require_own_names(schema.names, f"`{path}`")
        first = pyarrow.parquet.read_schema(files.paths[0])
        features = readable(first)
        unread = [f"`{field.name}` ({field.type})" for field in first if field.name not in features]
        options: dict[str, Any] = {}
        if unread or features != datasets.Features.from_arrow_schema(first):
            options = {"columns": list(features), "features": features}
        note = f"columns of `{files.key}` with types that are not read: {listed(unread, _UNREAD_SHOWN)}"
        return load_with_datasets("parquet", files, **options), [note] if unread else []

    def rows(self, path: Path, where: str, text: TextOptions) -> Iterator[Row | DataError]:
        import pyarrow
        import pyarrow.parquet

        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                require_own_names(file.schema_arrow.names, where)
                for batch in file.iter_batches(_ROWS_AT_ONCE):
                    yield from batch.to_pylist()
        except pyarrow.ArrowException as error:
            raise DataError(f"{where} must hold parquet, but cannot be read: {reason(error)}") from error

    def bound_bytes(self, path: Path) -> float:
        """See `Reader`: each value of a column may be the longest one of the dictionaries."""
        bound = 0.0
        with _with_dictionaries(path) as file:
            for number in range(file.num_row_groups):
                first = next(file.iter_batches(1, row_groups=[number]), None)
                longest = max(map(_longest, first.columns if first else ()), default=0)
                group = file.metadata.row_group(number)
                for column in map(group.column, range(group.num_columns)):
                    is_text, prefixes = column.physical_type == "BYTE_ARRAY", "DELTA_BYTE_ARRAY" in column.encodings
                    # In this encoding, a value repeats the start of the one before, so its length has no bound.
                    of_value = (math.inf if prefixes else longest) if is_text else 16
                    bound += column.total_uncompressed_size + column.num_values * of_value
        return bound

    def unpacked_bytes(self, path: Path) -> Iterator[int]:
        """See `Reader`. A value that rows repeat is in the file once, so texts are read as places in a dictionary."""
        with _with_dictionaries(path) as file:
            for batch in file.iter_batches(_ROWS_AT_ONCE):
                yield sum(map(_logical_bytes, batch.columns))


def readable(schema: pyarrow.Schema) -> Features:
    """Return the types of the columns that `datasets` can read, with views of texts as texts."""
    import datasets
    import pyarrow

    found = {}
    for field in schema:
        with suppress(ValueError):  # a map, a view of a list, or a type of another package
            one = pyarrow.schema([field], schema.metadata)
            found[field.name] = _without_views(datasets.Features.from_arrow_schema(one)[field.name])
    return datasets.Features(found)


def _without_views(feature: Any) -> Any:
    """Return a type with texts and binary values as tasks read them, instead of views of them."""
    import datasets

    if isinstance(feature, dict):
        return {key: _without_views(inner) for key, inner in feature.items()}
    if isinstance(feature, datasets.List | datasets.LargeList):
        return replace(feature, feature=_without_views(feature.feature))
    dtype = str(getattr(feature, "dtype", ""))
    return datasets.Value(dtype.removesuffix("_view")) if dtype in ("string_view", "binary_view") else feature


def _with_dictionaries(path: Path) -> Any:
    """Open a Parquet file in which texts stay places in a dictionary."""
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
    columns = [group.column(number) for group in groups for number in range(group.num_columns)]
    texts = [one for one in columns if one.physical_type == "BYTE_ARRAY" and one.has_dictionary_page]
    return ParquetFile(path, read_dictionary=list({one.path_in_schema for one in texts}))


def _longest(column: Any) -> int:
    """Return the bytes of the longest value of the dictionaries of a column."""
    from pyarrow import compute, types

    found = [
        compute.max(compute.binary_length(one.dictionary)) for one in leaves(column) if types.is_dictionary(one.type)
    ]
    return max((value.as_py() or 0 for value in found), default=0)


def _logical_bytes(column: Any) -> int:
    """Return the bytes of a column, in which each use of a value of a dictionary counts."""
    from pyarrow import compute, types

    return sum(
        compute.sum(compute.binary_length(one.dictionary).take(one.indices)).as_py() or 0
        if types.is_dictionary(one.type)
        else one.nbytes
        for one in leaves(column)
    )
