from __future__ import annotations

import datetime
from pathlib import Path

import openpyxl
import pandas
import pytest

from tests.helpers.rows import load_files
from trainer.base.errors import DataError
from trainer.data.formats.base import TextOptions
from trainer.data.sources import load_splits
from trainer.recipe.schema import FileData
from trainer.tools.predict.chunked_rows import input_format, read_chunks
from trainer.use import trained

ROWS = [{"text": "one", "label": "a"}, {"text": "two", "label": "b"}]


def rows_with_classes(path):
    data = FileData(source="files", train=str(path))
    return load_splits(data, columns=("text", "label"), kinds={"text": "text", "label": "class"}).train.rows


def test_excel(in_folder):
    pandas.DataFrame(ROWS).to_excel("rows.xlsx", index=False)
    assert load_files("rows.xlsx").train.rows.to_list() == ROWS
    with pandas.ExcelWriter("sheets.xlsx") as book:
        for name in ("train", "test"):
            pandas.DataFrame(ROWS[: 1 if name == "test" else None]).to_excel(book, sheet_name=name, index=False)
    splits = load_files("sheets.xlsx")
    assert splits.train.rows.to_list() == ROWS
    (note,) = splits.notes
    assert (
        "of the sheets of `sheets.xlsx`, the first, `train`, is read; to read `test` instead, set `data.sheet`" in note
    )
    splits = load_files("sheets.xlsx", sheet="test")
    assert (splits.train.rows.to_list(), splits.notes) == (ROWS[:1], ())
    with pytest.raises(
        DataError, match=r"`data.sheet` must name a sheet of `sheets.xlsx`, but is 'Test'; it has `train"
    ):
        load_files("sheets.xlsx", sheet="Test")
    Path("rows.jsonl").write_text("{}\n")
    with pytest.raises(
        DataError, match=r"`data.sheet` is for Excel files, but `rows.jsonl` is read as json; remove it"
    ):
        load_files("rows.jsonl", sheet="test")


def test_excel_cells_of_several_types(tmp_path):
    columns = {
        "text": ["a", 7, 1.5, None],
        "label": ["007", 10, "1.10", True],
        "score": [1, 2.5, None, 10],
        "day": [datetime.datetime(2024, 1, 2), "x", None, 3],
    }
    pandas.DataFrame(columns).to_excel(tmp_path / "a.xlsx", index=False)
    rows = rows_with_classes(tmp_path / "a.xlsx")
    assert rows["text"][:] == ["a", "7", "1.5", None]
    assert rows["label"][:] == ["007", "10", "1.10", "True"]
    assert rows["score"][:] == [1.0, 2.5, None, 10.0]
    assert rows["day"][0].startswith("2024-01-02")


def test_excel_numbers_that_are_shown_with_zeros(tmp_path):
    book = openpyxl.Workbook()
    for row in (["text", "label"], ["a", 7], ["b", 10], [None, None], ["7", 1200]):
        book.active.append(row)
    for row in range(2, 6):
        book.active.cell(row, 2).number_format = "000"
    book.save(tmp_path / "a.xlsx")
    rows = rows_with_classes(tmp_path / "a.xlsx")
    assert rows["label"][:] == ["007", "010", None, "1200"]
    assert rows["text"][-1] == "7"


def test_sheets_are_read_to_predict(tmp_path):
    with pandas.ExcelWriter(tmp_path / "a.xlsx") as book:
        pandas.DataFrame(ROWS).to_excel(book, sheet_name="first", index=False)
        pandas.DataFrame({"text": ["three", None, "007"]}).to_excel(book, sheet_name="second", index=False)
    text = TextOptions(further={"sheet": "second"})
    chunks = list(read_chunks(tmp_path / "a.xlsx", input_format(tmp_path / "a.xlsx"), 2, 0, "`a.xlsx`", text=text))
    assert chunks == [[{"text": "three"}, {"text": None}], [{"text": "007"}]]
    values = {"data": {"source": "files", "train": "a.xlsx", "sheet": "second"}}
    trained._set_data(values, tmp_path, (), evaluates=False)
    assert values["data"]["sheet"] == "second", "the recipe's sheet is that of workbooks to predict"
