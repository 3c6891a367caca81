from __future__ import annotations

import json

import datasets
import pyarrow
import pytest

from trainer.base.errors import DataError
from trainer.data.formats.base import TextOptions
from trainer.data.formats.table import reader_of
from trainer.data.sources import load_splits
from trainer.recipe.schema import FileData

ROWS = [{"text": f"word {row}", "label": row % 2, "tags": ["x"] * (row % 3)} for row in range(11)]


def write(path, table, makes=pyarrow.ipc.new_file, **keys):
    with makes(str(path), table.schema, **keys) as writer:
        writer.write_table(table, max_chunksize=4)


def loaded(train):
    return load_splits(FileData(source="files", train=str(train)))


@pytest.mark.parametrize("makes", [pyarrow.ipc.new_file, pyarrow.ipc.new_stream])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_both_formats_have_the_rows_of_json_lines(tmp_path, makes, compression):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    options = pyarrow.ipc.IpcWriteOptions(compression=compression)
    write(tmp_path / "a.arrow", pyarrow.Table.from_pylist(ROWS), makes, options=options)
    ours, theirs = (loaded(tmp_path / name).train.rows for name in ("a.arrow", "a.jsonl"))
    assert ours[:] == theirs[:]
    assert ours.features == theirs.features
    assert list(reader_of("arrow").rows(tmp_path / "a.arrow", "a.arrow", TextOptions())) == ROWS


def test_a_folder_of_datasets_keeps_its_types(tmp_path):
    kinds = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    rows = datasets.Dataset.from_list([{"text": row["text"], "label": row["label"]} for row in ROWS], features=kinds)
    rows.save_to_disk(tmp_path / "saved", num_shards=3)
    found = loaded(tmp_path / "saved" / "*.arrow").train.rows
    assert found.features == kinds
    assert found[:] == rows[:]


def test_columns_of_other_types_are_left_out_with_a_note(tmp_path):
    kind = pyarrow.map_(pyarrow.string(), pyarrow.int32())
    table = pyarrow.table(
        {"text": pyarrow.array(["a", "b"], pyarrow.string_view()), "map": pyarrow.array([[], []], kind)}
    )
    write(tmp_path / "a.arrow", table)
    splits = loaded(tmp_path / "a.arrow")
    assert splits.train.rows[:] == {"text": ["a", "b"]}
    assert "types that are not read: `map` (map<string, int32>)" in " ".join(splits.notes)


def test_damaged_files_are_named(tmp_path):
    whole = tmp_path / "whole.arrow"
    write(whole, pyarrow.table({"text": ["word " * 20] * 9}))
    content = whole.read_bytes()
    offsets = content.index((100).to_bytes(4, "little") + (200).to_bytes(4, "little"))
    wrong = content[:offsets] + (1 << 30).to_bytes(4, "little") + content[offsets + 4 :]
    for bad in (content[:-7], content[: len(content) // 2], wrong, b"no Arrow", b""):
        (tmp_path / "a.arrow").write_bytes(bad)
        with pytest.raises(DataError, match=r"`.*a\.arrow`"):
            loaded(tmp_path / "a.arrow")


def test_files_with_other_columns_are_refused(tmp_path):
    write(tmp_path / "1.arrow", pyarrow.table({"text": ["a"]}))
    write(tmp_path / "2.arrow", pyarrow.table({"text": [1]}))
    with pytest.raises(DataError, match="text"):
        loaded(tmp_path / "*.arrow")
