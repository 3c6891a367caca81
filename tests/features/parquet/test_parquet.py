from __future__ import annotations

import datetime
import json
from decimal import Decimal

import pyarrow
import pyarrow.parquet
import pytest

from trainer.base.errors import DataError
from trainer.data.formats.table import reader_of
from trainer.data.sources import load_splits
from trainer.recipe.schema import FileData
from trainer.tools.predict.chunked_rows import read_chunks


def parts_of(folder, *parts):
    for number, rows in enumerate(parts):
        lines = "".join(json.dumps(row, default=str) + "\n" for row in rows)
        (folder / f"{number}.jsonl").write_text(lines)
    return [folder / f"{number}.jsonl" for number in range(len(parts))]


def written(folder, *parts, name="out.parquet", **keys):
    reader_of("parquet").write(parts_of(folder, *parts), folder / name, **keys)
    return pyarrow.parquet.read_table(folder / name)


def test_columns_of_a_parquet_file_keep_their_types(tmp_path):
    source = pyarrow.table(
        {
            "id": pyarrow.array([2**63 + row for row in range(5)], pyarrow.uint64()),
            "when": pyarrow.array([datetime.datetime(2024, 1, 1)] * 5, pyarrow.timestamp("ns", "UTC")),
            "price": pyarrow.array([Decimal("1.10")] * 5, pyarrow.decimal128(9, 2)),
            "kind": pyarrow.array(["a", "b", "a", None, "a"]).dictionary_encode(),
            "map": pyarrow.array([[("a", 1)]] * 5, pyarrow.map_(pyarrow.string(), pyarrow.int32())),
            "short": pyarrow.array(range(5), pyarrow.int8()),
        }
    )
    more = {"bytes": [b"x"] * 5, "image": [{"bytes": b"x", "path": None}] * 5}
    pyarrow.parquet.write_table(
        pyarrow.table({**dict(zip(source.column_names, source.columns, strict=True)), **more}),
        tmp_path / "in.parquet",
        row_group_size=2,
    )
    rows = [{**row, "prediction": "x"} for row in source.to_pylist()]
    rows[3] = {**source.to_pylist()[3], "error": "bad"}
    table = written(tmp_path, rows[:3], rows[3:], source=tmp_path / "in.parquet")
    assert table.select(source.column_names).equals(source)
    assert table["prediction"].to_pylist() == ["x", "x", "x", None, "x"]
    assert table["error"].to_pylist() == [None, None, None, "bad", None]


def test_other_rows_have_the_types_of_their_values(tmp_path):
    large = [{"id": 1}], [{"id": 2**64 - 1}, {"id": None, "late": 1.5}]
    assert written(tmp_path, *large).to_pylist() == [
        {"id": 1, "late": None}, {"id": 2**64 - 1, "late": None}, {"id": None, "late": 1.5}
    ]  # fmt: skip
    for values in ([2**64], [2**63, -1], [1, "a"]):
        with pytest.raises(DataError, match=r"which needs one type for each column, .* write JSON Lines"):
            written(tmp_path, [{"id": value} for value in values])


VIEWS = {"text": pyarrow.array(["a", "b"], pyarrow.string_view()), "bytes": pyarrow.array([b"a"] * 2, "binary_view")}
UNREAD = {
    "map": pyarrow.array([[("a", 1)]] * 2, pyarrow.map_(pyarrow.string(), pyarrow.int32())),
    "list": pyarrow.array([["x"]] * 2, pyarrow.list_view(pyarrow.string())),
    "id": pyarrow.array([b"0123456789abcdef"] * 2, pyarrow.uuid()),
}


def test_types_of_parquet(tmp_path):
    place = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({**VIEWS, "label": ["x", "y"], **UNREAD}), place)
    splits = load_splits(FileData(source="files", train=str(place)))
    assert splits.train.rows.to_list() == [
        {"text": "a", "bytes": b"a", "label": "x"}, {"text": "b", "bytes": b"a", "label": "y"}
    ]  # fmt: skip
    assert splits.train.rows.features["text"].dtype == "string"
    assert "types that are not read: `map` (map<string, int32" in splits.notes[0]
    twice = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 3, names=["text", "label", "label"])
    pyarrow.parquet.write_table(twice, place)
    with pytest.raises(DataError, match="names `label` more than once; rename one"):
        load_splits(FileData(source="files", train=str(place)))
    with pytest.raises(DataError, match="names `label` more than once; rename one"):
        next(read_chunks(place, "parquet", 10, 0, "it"))
