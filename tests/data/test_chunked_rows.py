"""The files of predictions: types of Parquet, and texts that spreadsheets take for formulas."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal

import pyarrow
import pyarrow.parquet
import pytest

from trainer.base.errors import DataError
from trainer.data.formats.table import reader_of


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


@pytest.mark.parametrize(("name", "separator"), [("out.csv", ","), ("out.tsv", "\t")])
def test_formulas_are_escaped_on_demand(tmp_path, name, separator):
    cells = ["=1+1", "+a", "-a", "@a", "\ta", "a=1", "-1.5", "+1"]
    parts = parts_of(tmp_path, [{"=n": 1, "a": cell} for cell in cells])
    reader_of("csv").write(parts, tmp_path / name)
    plain = (tmp_path / name).read_text()
    assert plain.startswith(f"=n{separator}a\n1{separator}=1+1\n")
    reader_of("csv").write(parts, tmp_path / name, escapes_formulas=True)
    found = (tmp_path / name).read_text()
    assert found.count("'") == 6
    assert found.replace("'", "") == plain
    assert all(f"{separator}{cell}\n" in found for cell in cells[5:])
