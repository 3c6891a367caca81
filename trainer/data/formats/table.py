"""The table of formats. A reader is imported when a file of its format is read."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Literal

from trainer.base.extensions import resolved
from trainer.data.formats.base import Reader, ending

Format = Literal["json", "csv", "parquet", "excel", "conll", "megatron"]
_READERS: Mapping[Format, str] = {
    "json": "json_lines:JsonReader",
    "csv": "csv_files:CsvReader",
    "parquet": "parquet:ParquetReader",
    "excel": "excel:ExcelReader",
    "conll": "conll:ConllReader",
    "megatron": "megatron:MegatronReader",
}
ENDINGS: Mapping[Format, tuple[str, ...]] = {
    "json": (".json", ".jsonl", ".ndjson"),
    "csv": (".csv", ".tsv", ".tab"),
    "parquet": (".parquet",),
    "excel": (".xlsx",),
    "conll": (".conll", ".bio", ".iob"),
    "megatron": (".idx",),
}
FORMAT_OF_ENDING: Mapping[str, Format] = {end: name for name, ends in ENDINGS.items() for end in ends}


@cache
def reader_of(file_format: Format) -> Reader:
    """Return the reader of a format."""
    reader: Reader = resolved(f"trainer.data.formats.{_READERS[file_format]}")()
    return reader


def format_of(path: Path) -> Format | None:
    """Return the format that the ending of a file names, without `.gz`; None: it is unknown."""
    return FORMAT_OF_ENDING.get(ending(path))
