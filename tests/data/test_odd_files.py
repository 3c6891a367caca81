"""Files that readers take in another sense than the user, or fail on, are refused or noted by name."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from trainer.base.errors import DataError, UsageError
from trainer.data.formats.base import TextOptions
from trainer.data.sources import Splits, load_splits
from trainer.recipe.schema import FileData
from trainer.tools.predict.chunked_rows import read_chunks
from trainer.tools.predict.prediction_files import spooled


def load(path: Path, content: str | bytes, **keys) -> Splits:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return load_splits(FileData(source="files", train=str(path), **keys))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("text,label,label\na,0,1\n", "names `label` more than once; rename one"),
        ("text,note,label\nid0,a,x,0\nid1,b,y,1\n", "has 3 names and 4 values in its first row"),
        ("text,label\n\na,0,\nb,1,\n", "has 2 names and 3 values in its first row; add the missing name, or remove"),
    ],
    ids=["equal names", "a nameless index", "a delimiter at the end"],
)
def test_columns_without_a_name_of_their_own(tmp_path, content, words):
    with pytest.raises(DataError, match=words):
        load(tmp_path / "a.csv", content)


MERGED = 'text\tlabel\na\t0\n"b\t1\nc\t0\n"d\t1\ne\t0\n'


def test_quotation_marks_that_join_rows(tmp_path):
    with pytest.raises(DataError, match=r"row 2 \(line 3\) of .* holds a tab and a line break.*set `data.quotes`"):
        load(tmp_path / "a.tsv", MERGED)
    rows = load(tmp_path / "a.tsv", MERGED, quotes=False).train.rows
    assert (rows["text"][:], rows["label"][:]) == (["a", '"b', "c", '"d', "e"], [0, 1, 0, 1, 0])
    splits = load(tmp_path / "a.csv", MERGED.replace("\t", ","))
    assert [note.partition(" of ")[0] for note in splits.notes] == ["column `text`, row 2"]
    assert "holds lines that look like rows" in splits.notes[0]
    assert load(tmp_path / "b.csv", 'text,label\n"Dear Sir,\nyes, I do\nbye, now",1\n', quotes=True).notes != ()
    assert load(tmp_path / "c.csv", 'text,label\n"Dear Sir\nyes\nbye, now",1\n').notes == ()
    with pytest.raises(DataError, match="row 2 of it must have one line, but a quotation mark in its text"):
        list(read_chunks(tmp_path / "a.tsv", "csv", 10, 0, "it"))


@pytest.mark.parametrize(
    ("name", "rows", "line", "values"),
    [
        ("a.tsv", 'a\t0\n"b\t1\nc\t0\n', 3, ["a", '"b', "c"]),
        ("a.csv", 'a,0\n"b,1\nc,0', 3, ["a", '"b', "c"]),
        ("b.tsv", 'a\t"0\nb\t1\n', 2, ["a", "b"]),
        ("one.csv", 'a\n"b\nc\n', 3, ["a", '"b', "c"]),
    ],
)
def test_a_quotation_mark_that_is_not_closed(tmp_path, name, rows, line, values):
    header = {"a.csv": "text,label\n", "one.csv": "text\n"}.get(name, "text\tlabel\n")
    with pytest.raises(DataError, match=rf"line {line} of .* is not closed; set `data.quotes` to false"):
        load(tmp_path / name, header + rows)
    *_, last = next(read_chunks(tmp_path / name, "csv", 10, 0, "it", keeps_errors=True))
    assert f"row {line - 1} of it must close its quotation mark" in str(last)
    assert load(tmp_path / name, header + rows, quotes=False).train.rows["text"][:] == values


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.json"])
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32"])
def test_wide_encodings_without_a_mark(tmp_path, name, encoding):
    rows = [{"text": "\u5f88\u597d\u7684\u7535\u5f71" * 3, "label": "x"}] * 20
    text = {
        "a.csv": "text,label\n" + "".join(f"{row['text']},x\n" for row in rows),
        "a.jsonl": "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows),
        "a.json": json.dumps(rows, ensure_ascii=False),
    }[name]
    with pytest.raises(DataError, match=rf"in the encoding utf-8, but .*`data.encoding`, such as {encoding}"):
        load(tmp_path / name, text.encode(encoding))
    with pytest.raises(DataError, match=f"utf-8, but it does not; save it .*, such as {encoding}"):
        next(read_chunks(tmp_path / name, "json", 10, 0, "it"))
    assert load(tmp_path / name, text.encode(encoding), encoding=encoding).train.rows.to_list() == rows


def test_one_line_that_is_not_utf8(tmp_path):
    for bad in (b"na\xefve", b"\xed\xa0\x80"):
        with pytest.raises(DataError, match=r"but line 3 of .* does not, though others do; correct it$"):
            load(tmp_path / "a.csv", "text,label\ncaf\xe9,a\n".encode() + bad + b",b\n")


def test_lists_of_json_keep_numbers_and_refuse_halves_of_pairs(tmp_path):
    rows = [{"text": "a\U0001f600", "n": 1e-12, "i": 2**53 + 1}, {"text": "\\ud800", "n": 0.1234567890123456, "i": 1}]
    assert load(tmp_path / "a.json", json.dumps(rows, indent=1)).train.rows.to_list() == rows
    for name, place in (("a.json", "a text"), ("a.jsonl", "line 2")):
        lines = [json.dumps({"text": text}) for text in ("a", "b\ud800")]
        content = "\n".join(lines) if name == "a.jsonl" else f"[{','.join(lines)}]"
        with pytest.raises(DataError, match=rf"{place} of .* has half of a surrogate pair, .*; correct it"):
            load(tmp_path / name, content)


def test_empty_lines_and_lines_of_null(tmp_path):
    rows = '{"text": "a\\u2028", "label": null}\n\n{"text": "b", "label": 1}\n'
    for first in ("\n", " \t\n\n", "\r\n", "\ufeff\n"):
        found = load(tmp_path / "a.jsonl", first + rows).train
        assert found.rows["text"][:] == ["a\u2028", "b"]
        assert found.places.of(0) == f"line {first.count(chr(10)) + 1}"
        assert next(read_chunks(tmp_path / "a.jsonl", "json", 9, 0, "it")) == list(found.rows)
    for first, line in (("null\n", 1), ("\n null\n", 2), (rows + "null\n", 4)):  # pyarrow ends the process at line 1
        with pytest.raises(DataError, match=rf"line {line} of `.*` is null, not a JSON object; remove the line"):
            load(tmp_path / "a.jsonl", first + rows)
    load(tmp_path / "b.json", '[{"text": "a", "label": [\nnull\n]}]')
    with pytest.raises(DataError, match=r"line 4 of `.*` is not JSON"):
        load(tmp_path / "a.jsonl", rows.replace("\\u2028", "\u2028") + "{bad\n")


def test_json_in_another_encoding_than_that_of_json(tmp_path):
    text = '{"text": "caf\xe9", "label": 0}\n{"text": "b", "label": 1}\n'
    with pytest.raises(DataError, match=r"encoding utf-8, but .* does not; .* such as latin-1"):
        load(tmp_path / "a.jsonl", text.encode("latin-1"))
    assert load(tmp_path / "a.jsonl", text.encode("latin-1"), encoding="latin-1").train.rows[0]["text"] == "caf\xe9"
    with pytest.raises(DataError, match=r"encoding utf-8, but .* does not; .* such as utf-16"):
        load(tmp_path / "b.jsonl", text.encode("utf-16"))
    with pytest.raises(DataError, match=r"`--input` must hold text in the encoding utf-8, but it does not"):
        list(read_chunks(tmp_path / "a.jsonl", "json", 10, 0, "it"))


@pytest.mark.parametrize("ending", ["jsonl.gz", "csv.gz"])
@pytest.mark.parametrize("kind", ["cut", "not compressed"])
def test_damaged_gzip_files(tmp_path, ending, kind):
    text = b'{"text": "a"}\n' * 50 if ending == "jsonl.gz" else b"text\na\n" * 50
    content = text if kind == "not compressed" else gzip.compress(text)[:-20]
    with pytest.raises(DataError, match=r"`data.train` must hold (json|csv), but .* cannot be read: \w+"):
        load(tmp_path / f"a.{ending}", content)


def test_a_file_that_is_named_twice(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n')
    splits = load_splits(FileData(source="files", train=[str(path), str(tmp_path / "*.jsonl")]))
    assert len(splits.train.rows) == 2
    assert splits.notes == (f"`data.train` names `{path}` more than once, so its rows are there more than once",)


def test_rows_that_python_cannot_read_or_write(tmp_path):
    deep, long = "[" * 100_000 + "]" * 100_000, "1" * 5000
    (tmp_path / "a.jsonl").write_text(
        "".join(f'{{"text": {value}}}\n' for value in ('"a"', deep, long, "[" * 101 + "]" * 101, '"\\ud800"', '"b"'))
    )
    (first, *bad, last) = next(read_chunks(tmp_path / "a.jsonl", "json", 9, 0, "it", keeps_errors=True))
    assert (first, last) == ({"text": "a"}, {"text": "b"})
    for line, error in enumerate(bad, start=2):
        problem = "must have at most 100 levels of lists" if line < 5 else "has half of a surrogate pair"
        assert f"line {line} of it {problem}" in str(error)
    for before in ("", '{"text": "a"}\n'):  # in the first line, it would end the process of the reader
        words = rf"line {1 + bool(before)} of `.*b.jsonl` has too many levels of lists and objects; write"
        with pytest.raises(DataError, match=words):
            load(tmp_path / "b.jsonl", f'{before}{{"text": {deep}}}\n')
    with pytest.raises(DataError, match=r"line 4 of `.*` has a number that is too large"):
        load(tmp_path / "c.jsonl", '{"n": 1.5}\n\n{"n": 1.5}\n{"n": 1e400}\n')


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_integers_of_more_than_64_bits(tmp_path, name):
    def written(*values):
        lines = [json.dumps({"n": value}) for value in values]
        return "\n".join(lines) if name == "a.jsonl" else f"[{','.join(lines)}]"

    for values in ((1, 2**63), (1.5, -(2**63) - 1), ([1], [2**64]), ({"x": 1}, {"x": 2**63 + 1})):
        place = "line 2 of `.*`" if name == "a.jsonl" else "`.*`"
        with pytest.raises(DataError, match=rf"{place} has the integer -?[0-9]{{19,20}}, which 64 bits do not hold"):
            load(tmp_path / name, written(*values))
    for values in ((2**63 - 1, -(2**63)), (1e19, 1.5), (1e19, 2**60)):
        assert load(tmp_path / name, written(*values)).train.rows["n"][:] == list(values)


def test_long_values_of_csv_files(tmp_path):
    text = "long " * 30_000  # the limit of Python's `csv` is 131,072 characters
    found = load(tmp_path / "a.csv", f"text,label\n{text},1\n")
    assert (found.train.rows["text"][:], found.train.places.of(0)) == ([text], "line 2")
    assert next(read_chunks(tmp_path / "a.csv", "csv", 9, 0, "it")) == [{"text": text, "label": "1"}]


def test_an_empty_line_of_one_column_is_a_row_to_predict(tmp_path):
    (tmp_path / "a.csv").write_text("text\nnull\nNA\n\nx\n\n\n")
    (chunk,) = read_chunks(tmp_path / "a.csv", "csv", 9, 0, "it")
    assert [row["text"] for row in chunk] == ["null", "NA", "", "x"]


def test_pipes_and_folders_are_no_files(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(UsageError, match=r"pipe.jsonl is a pipe or a device; name another, or pass JSON Lines to"):
        spooled(str(tmp_path / "pipe.jsonl")).__enter__()
    with pytest.raises(DataError, match=r"is a folder; for a data set in a folder set `data.source` to \"hub\""):
        load_splits(FileData(source="files", train=str(tmp_path)))


def test_another_file_with_the_time_of_the_first_one(tmp_path):
    for text in ("one", "two"):
        load(tmp_path / "a.csv", f"text\n{text}\n")
        os.utime(tmp_path / "a.csv", (1, 1))
        assert load_splits(FileData(source="files", train=str(tmp_path / "a.csv"))).train.rows["text"][:] == [text]


@pytest.mark.parametrize("name", ["json-train", "trainer-map-*"])
def test_a_damaged_file_in_the_cache_of_datasets_is_written_again(tmp_path, monkeypatch, name):
    monkeypatch.setattr("trainer.features.data_map.source_map._IN_MEMORY_BYTES", 0)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a"}\n')
    for kept in (None, -9, 0):
        for made in (tmp_path / "cache").rglob(f"{name}.arrow"):
            content = made.read_bytes()[:kept]
            made.unlink()  # `datasets` may still have it mapped
            made.write_bytes(content)
        read = load_splits(FileData(source="files", train=str(file), map={"columns": {"twice": "{text}{text}"}}))
        assert read.train.rows["twice"][:] == ["aa"]


def test_a_file_of_one_list_is_read_as_rows(tmp_path):
    rows = [{"text": "é"}, {"text": None}, {"text": "b"}]
    for name, content in (("a.json", json.dumps(rows, indent=1)), ("b.json", json.dumps(rows))):
        (tmp_path / name).write_text(content, encoding="utf-16")
        text = TextOptions("utf-16")
        assert list(read_chunks(tmp_path / name, "json", 2, 1, name, text=text)) == [rows[1:]]
    (tmp_path / "c.json").write_text('[{"text": "a"},\n')
    with pytest.raises(DataError, match=r"line 1 of c.json must be a JSON object, but is not JSON"):
        list(read_chunks(tmp_path / "c.json", "json", 2, 0, "c.json"))
