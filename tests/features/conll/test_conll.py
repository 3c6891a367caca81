from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from tests.helpers.rows import load_files, write_rows
from trainer.base.errors import DataError
from trainer.tools.predict.chunked_rows import input_format, read_chunks

CONLL = "-DOCSTART- -X- O\n\nAda NNP B-PER\r\nruns VBZ O\n \n\nNew York\tNNP\tB-LOC\n# x O"
CONLL_ROWS = [
    {"words": ["Ada", "runs"], "tags": ["B-PER", "O"]},
    {"words": ["New York", "#"], "tags": ["B-LOC", "O"]},
]


@pytest.mark.parametrize("name", ["rows.conll", "rows.bio.gz", "rows.txt"])
def test_conll(in_folder, name):
    data = f"\ufeff{CONLL}".encode()
    Path(name).write_bytes(gzip.compress(data, mtime=0) if name.endswith(".gz") else data)
    file_format = "conll" if name == "rows.txt" else None
    assert load_files(name, file_format=file_format).train.rows.to_list() == CONLL_ROWS
    if not name.endswith(".gz"):
        found = input_format(Path(name), file_format)
        chunks = list(read_chunks(Path(name), found, 1, 0, name))
        assert chunks == [[row] for row in CONLL_ROWS]


def test_conll_without_tags_and_with_wrong_lines(in_folder):
    assert load_files(write_rows(in_folder, "words.conll", "Ada\nruns\n\nso\n")).train.rows.to_list() == [
        {"words": ["Ada", "runs"]},
        {"words": ["so"]},
    ]
    message = r"line 3 of `rows.conll` must have 2 columns, as line 1 has, but has 3: '# id 7'; correct or remove it"
    with pytest.raises(DataError, match=message):
        load_files(write_rows(in_folder, "rows.conll", "Ada B-PER\n\n# id 7\nBob B-PER\n"))
    with pytest.raises(DataError, match=r"line 1 of `rows.conll` must have a word and a tag, but one is empty"):
        load_files(write_rows(in_folder, "rows.conll", "Ada\t\n"))
    with pytest.raises(DataError, match="must hold at least one row"):
        load_files(write_rows(in_folder, "rows.conll", "\n\n"))
    Path("rows.conll").write_bytes("Zoë B-PER\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"in the encoding utf-8, but `rows\.conll` does not"):
        load_files("rows.conll")
