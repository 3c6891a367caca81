"""Small files that unpack to far more than rows hold: a named refusal, before memory or disk are full."""

from __future__ import annotations

import gzip
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.base.errors import DataError
from trainer.data.formats import base
from trainer.data.formats.base import Files, TextOptions, require_bounded
from trainer.data.formats.table import format_of, reader_of
from trainer.data.readers import read_files
from trainer.tools.predict.chunked_rows import read_chunks

ROWS, LONG = 2000, "word " * 200  # 2 MB of texts


def repeated(values: list[str], number: int = ROWS) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array([row % len(values) for row in range(number)], pa.int32()), values)


def write(folder: Path, kind: str) -> Path:
    file = folder / f"{kind}.parquet"
    many, once = {"label": ["a", "b"] * (ROWS // 2)}, {"store_schema": False, "compression": "zstd"}
    if kind == "values":
        pq.write_table(pa.table({"text": repeated([LONG]), **many}), file, **once)
    elif kind == "lists":
        words = pa.ListArray.from_arrays(pa.array(range(0, ROWS + 1, 2), pa.int32()), repeated([LONG]))
        pq.write_table(pa.table({"words": pa.StructArray.from_arrays([words], ["inner"])}), file, **once)
    elif kind == "pages":
        pq.write_table(pa.table({"text": ["word " * 400_000]}), file, use_dictionary=False, **once)
    elif kind == "prefixes":
        encoding = {"text": "DELTA_BYTE_ARRAY", "label": "PLAIN"}
        table = pa.table({"text": [LONG] * ROWS, **many})
        pq.write_table(table, file, use_dictionary=False, column_encoding=encoding, **once)
    elif kind == "sheets":
        file = folder / "sheets.xlsx"
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("xl/worksheets/sheet1.xml", LONG * ROWS)
    else:
        rows = {
            "lines.jsonl": f'{{"text": "{LONG}", "label": "a"}}\n' * ROWS,
            "line.jsonl": f'{{"text": "{LONG * ROWS}", "label": "a"}}\n',
            "lines.csv": "text,label\n" + f"{LONG},a\n" * ROWS,
            "lines.conll": f"{'a' * 1000}\tO\n" * ROWS,
        }[kind]
        file = folder / f"{kind}.gz"
        file.write_bytes(gzip.compress(rows.encode()))
    return file


@pytest.mark.parametrize(
    "kind",
    ["values", "lists", "pages", "prefixes", "sheets", "lines.jsonl", "line.jsonl", "lines.csv", "lines.conll"],
)
def test_a_bomb_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str):
    file = write(tmp_path, kind)
    file_format = format_of(file)
    assert file_format is not None
    require_bounded(reader_of(file_format), file, "`data.train`")  # rows of less than 1 GiB are no bomb
    monkeypatch.setattr(base, "_FREE_BYTES", 1 << 19)
    monkeypatch.setattr(base, "_MOST_TIMES", 5)
    refusal = f"must hold at most 5 times the bytes of a compressed file, but `{file}` of .* unpacks to more than"
    with pytest.raises(DataError, match=f"`data.train` {refusal}"):
        read_files(file_format, Files([file], TextOptions(), "data.train"))
    if file.suffix == ".parquet":  # the only such file to predict
        with pytest.raises(DataError, match=f"INPUT {refusal}"):
            next(read_chunks(file, file_format, 10, 0, "INPUT"))


def test_long_rows_that_differ_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(base, "_FREE_BYTES", 1 << 19)
    monkeypatch.setattr(base, "_MOST_TIMES", 5)
    texts = [f"{row} " * 300 for row in range(ROWS)]
    pq.write_table(
        pa.table({"text": texts, "words": [[text] for text in texts]}), tmp_path / "a.parquet", compression=None
    )
    require_bounded(reader_of("parquet"), tmp_path / "a.parquet", "`data.train`")
