"""The reader of Parquet."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.base.errors import DataError
from trainer.data.formats.base import (
    Files,
    Loaded,
    Reader,
    Row,
    TextOptions,
    ending,
    leaves,
    load_with_datasets,
    note_on_unread,
    readable,
    reason,
    require_own_names,
    rows_of_part,
)

if TYPE_CHECKING:
    import pyarrow

_ROWS_AT_ONCE = 1000


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
        # A file without a row has no batch that `datasets` could read.
        paths = [path for path in files.paths if pyarrow.parquet.read_metadata(path).num_rows]
        if not paths:
            return None, []
        files = replace(files, paths=paths)
        first = pyarrow.parquet.read_schema(files.paths[0])
        features = readable(first)
        unread = [f"`{field.name}` ({field.type})" for field in first if field.name not in features]
        options: dict[str, Any] = {}
        if unread or features != datasets.Features.from_arrow_schema(first):
            options = {"columns": list(features), "features": features}
        return load_with_datasets("parquet", files, **options), note_on_unread(files.key, unread)

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

    def write(
        self, parts: Sequence[Path], path: Path, source: Path | None = None, escapes_formulas: bool = False
    ) -> None:
        import pyarrow

        try:
            _write(parts, path, source if source is not None and ending(source) == ".parquet" else None)
        except (pyarrow.ArrowException, OverflowError) as error:
            raise DataError(
                "`--output` is Parquet, which needs one type for each column, but the rows have several:"
                f" {reason(error)}; write JSON Lines, or leave the columns of the input out with --keep none"
            ) from error

    def bound_bytes(self, path: Path) -> float:
        """See `Reader`: each value of a column may be the longest one of the dictionaries."""
        bound = 0.0
        with _with_dictionaries(path) as file:
            for number in range(file.num_row_groups):
                first = next(file.iter_batches(1, row_groups=[number]), None)
                # A batch of one row has the whole dictionaries of its row group.
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


def _write(parts: Sequence[Path], path: Path, source: Path | None) -> None:
    import pyarrow
    from pyarrow import parquet

    with ExitStack() as stack:
        file = None if source is None else stack.enter_context(parquet.ParquetFile(source))
        kept = pyarrow.schema([] if file is None else [one for one in file.schema_arrow if not _is_binary(one.type)])
        batches = iter(()) if file is None else file.iter_batches(columns=kept.names)
        # Also read twice: the types of a column must hold for all parts.
        made = _schema([_schema_of(part, kept.names) for part in parts])
        schema, left = pyarrow.schema([*kept, *made]), kept.empty_table()
        writer = stack.enter_context(parquet.ParquetWriter(path, schema))
        for part in parts:
            rows = list(rows_of_part(part))
            while kept.names and len(left) < len(rows):  # batches end with the groups of rows of the file
                batch = pyarrow.Table.from_batches([next(batches)]).select(kept.names)
                left = pyarrow.concat_tables([left, batch])
            columns = [pyarrow.array([row.get(field.name) for row in rows], field.type) for field in made]
            writer.write_table(pyarrow.Table.from_arrays([*left.slice(0, len(rows)).columns, *columns], schema=schema))
            # Rows of the source that belong to the next part.
            left = left.slice(len(rows))


def _schema(schemas: Sequence[pyarrow.Schema]) -> pyarrow.Schema:
    """Return the types that hold the values of all parts."""
    import pyarrow

    large = {field.name for schema in schemas for field in schema if field.type == pyarrow.uint64()}
    alike = [
        pyarrow.schema(
            [
                field.with_type(pyarrow.uint64()) if field.name in large and field.type == pyarrow.int64() else field
                for field in schema
            ]
        )
        for schema in schemas
    ]
    return pyarrow.unify_schemas(alike, promote_options="permissive")


def _schema_of(part: Path, left_out: Sequence[str]) -> pyarrow.Schema:
    """Return the types of the columns of a part; integers that are too large for int64 are uint64."""
    import pyarrow

    rows = list(rows_of_part(part))
    types = {}
    for name in dict.fromkeys(name for row in rows for name in row if name not in left_out):
        values = [row.get(name) for row in rows]
        try:
            types[name] = pyarrow.array(values).type
        except OverflowError:
            types[name] = pyarrow.array(values, pyarrow.uint64()).type
    return pyarrow.schema(types)


def _is_binary(kind: pyarrow.DataType) -> bool:
    """Return whether a type is that of binary values, or of images with their bytes."""
    import pyarrow.types as types

    if types.is_struct(kind):
        return any(field.name == "bytes" and _is_binary(field.type) for field in kind)
    return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind))
