"""Errors name the line of a row in its file, and the folder that is to blame."""

from __future__ import annotations

import datasets
import pytest

from trainer.base.errors import DataError, UsageError
from trainer.data.cache import open_or_write
from trainer.data.sources import load_splits
from trainer.recipe.schema import FileData

CSV = 'text,label\n"two\nlines",a\nb,b\n\n"three\n\nlines",c\nd,d\n'


def fails(split, row: int) -> str:
    with pytest.raises(DataError) as caught, split.explains_rows():
        raise DataError(f"column `label`, row {row} of {split.where} is null")
    return str(caught.value)


def test_lines_of_csv_cells_with_line_breaks(tmp_path):
    (tmp_path / "a.csv").write_text(CSV)
    split = load_splits(FileData(source="files", train=str(tmp_path / "a.csv"))).train
    lines = {row: CSV[: CSV.index(f",{'abcd'[row - 1]}\n")].count("\n") + 1 for row in (2, 4)}
    assert lines == {2: 4, 4: 9}
    for row, line in lines.items():
        assert f"row {row} (line {line}) of" in fails(split, row)


def test_lines_of_json_with_empty_lines_and_of_held_out_rows(tmp_path):
    rows = [f'{{"text": "{row}", "label": "{"ab"[row % 2]}"}}' for row in range(20)]
    (tmp_path / "a.jsonl").write_text("\n\n" + "\n".join(rows) + "\n")
    data = FileData(source="files", train=str(tmp_path / "a.jsonl"))
    assert "row 5 (line 7) of" in fails(load_splits(data).train, 5)
    splits = load_splits(data.model_copy(update={"validation": 0.2}), "label")
    for split in (splits.train, splits.validation):
        for row in range(len(split.rows)):
            assert f"(line {int(split.rows[row]['text']) + 3})" in fails(split, row + 1)
    (tmp_path / "b.jsonl").write_text("\n".join(rows))
    plain = load_splits(FileData(source="files", train=str(tmp_path / "b.jsonl"))).train
    assert "row 5 of" in fails(plain, 5), "the line is the row"


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_cache_entry_that_is_no_folder(tmp_path, kind):
    (tmp_path / "key").write_text("x") if kind == "file" else (tmp_path / "key").symlink_to(tmp_path / "none")
    with pytest.raises(UsageError, match=rf"key` is a {kind}; remove it"):
        open_or_write(tmp_path, "key", lambda writer: writer.add({"labels": [1]}))


def test_the_cache_of_datasets_is_blamed_for_itself(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "blocked").write_text("")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "blocked" / "datasets")
    with pytest.raises(UsageError, match=r"the cache of `datasets` must be a folder.*set HF_DATASETS_CACHE"):
        load_splits(FileData(source="files", train=str(tmp_path / "a.jsonl")))
