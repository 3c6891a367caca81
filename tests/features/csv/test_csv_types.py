"""The types of the columns of CSV files: texts and names of classes do not become numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.base.errors import DataError
from trainer.data.sources import load_splits
from trainer.recipe.schema import FileData, HubData
from trainer.tasks.sequence_classification import SequenceClassificationTask

COLUMNS = ("text", "label")
KINDS = {"text": "text", "label": "class"}


def csv_file(path: Path, cells: list[str]) -> str:
    path.write_text("text,label\n" + "".join(f"{row},{cell}\n" for row, cell in enumerate(cells)))
    return str(path)


def loaded(tmp_path, cells: list[str], validation: list[str] | None = None, kinds=KINDS, **keys):
    held = None if validation is None else csv_file(tmp_path / "validation.csv", validation)
    data = FileData(source="files", train=csv_file(tmp_path / "train.csv", cells), validation=held, **keys)
    return load_splits(data, columns=COLUMNS, kinds=kinds)


@pytest.mark.parametrize(
    ("cells", "classes", "values"),
    [
        (["007", "01", "10"], ["007", "01", "10"], ["007", "01", "10"]),
        (["+1", "-1"], ["+1", "-1"], ["+1", "-1"]),
        (["1e5", "1e6"], ["1e5", "1e6"], ["1e5", "1e6"]),
        (["1_000", "2"], ["1_000", "2"], ["1_000", "2"]),
        (["True", "False"], ["False", "True"], ["True", "False"]),
        (["NA", "null", "nan", "inf"], ["NA", "inf", "nan", "null"], ["NA", "null", "nan", "inf"]),
        (["2", "10000000000000000000000"], ["10000000000000000000000", "2"], ["2", "10000000000000000000000"]),
        (["1"] * 10_001 + ["A1"], ["1", "A1"], ["1"] * 10_001 + ["A1"]),
        (["1", "0", ""], None, [1, 0, None]),
        ([" 1", " 0"], ["0", "1"], [1, 0]),
        (["1.0", "0.0", "1"], ["0", "1"], [1.0, 0.0, 1.0]),
    ],
)
def test_classes_stay_as_they_are_written(tmp_path, cells, classes, values):
    rows = loaded(tmp_path, cells).train.rows
    assert rows["label"][:] == values
    assert rows["text"][:2] == ["0", "1"], "texts may be numbers"
    if classes is not None:
        assert SequenceClassificationTask(("text",), "label", ()).resolve(rows, "it").class_names == tuple(classes)


@pytest.mark.parametrize(
    ("cells", "validation", "labels", "indices"),
    [
        (["007", "01", "10"], ["10", "10"], None, [2, 2]),
        (["007", "01", "10"], ["10"], ("10", "007", "01"), [0]),
        (["007", "01", "1"], ["1"], None, [2]),
        (["1", "10"], ["007"], ("007", "1", "10"), [0]),
        (["1.0", "2.0", "n/a"], ["1.0"], None, [0]),
        (["1.10", "1.1"], ["1.10"], ("1.1", "1.10"), [1]),
        (["0", "1"], ["1"], ("no", "yes"), [1]),
    ],
)
def test_a_split_with_fewer_forms_has_the_same_classes(tmp_path, cells, validation, labels, indices):
    splits = loaded(tmp_path, cells, validation)
    task = SequenceClassificationTask(("text",), "label", (), class_names=labels).resolve(splits.train.rows, "it")
    task.check_columns(splits.validation.rows.features, "other")
    assert task.class_indices(splits.validation.rows, "other", 0) == indices


def test_numbers_are_no_classes_unless_they_are_listed(tmp_path):
    task = SequenceClassificationTask(("text",), "label", ())
    with pytest.raises(DataError, match=r'number 1.1; .* set `task.labels` to \["1.1", "1.10"\]$'):
        task.resolve(loaded(tmp_path, ["1.10", "1.1"]).train.rows, "it")


@pytest.mark.parametrize(
    ("cells", "values"),
    [
        (["007", "10"], ["007", "10"]),
        (["00.5", "1"], ["00.5", "1"]),
        (["1.50", "+2", ".5", "1e2"], [1.5, 2.0, 0.5, 100.0]),
        (["9007199254740993", ""], [9007199254740993, None]),
        (["18446744073709551615", "1"], [18446744073709551615, 1]),
        (["True", "FALSE", "true"], [True, False, True]),
        ([""] * 1001 + ["3"], [None] * 1001 + [3]),
        (["n/a", "1.5"], ["n/a", "1.5"]),
        (["", ""], [None, None]),
    ],
)
def test_other_columns_hold_numbers_unless_a_zero_leads(tmp_path, cells, values):
    assert loaded(tmp_path, cells, kinds={}).train.rows["label"][:] == values


def test_a_column_has_one_type_in_all_entries(tmp_path):
    csv_file(tmp_path / "a.csv", ["10", "20"])
    csv_file(tmp_path / "b.csv", ["007"])
    data = FileData(source="files", train=[str(tmp_path / "a.csv"), str(tmp_path / "b.csv")], mixture=[0.5, 0.5])
    assert load_splits(data, columns=COLUMNS, kinds=KINDS).train.rows["label"][:] == ["10", "20", "007"]


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ({"columns": {"text": "{label}", "label": "label"}}, ["007", "1.10", "True"]),
        ({"columns": {"text": {"column": "label", "type": "text"}, "label": "label"}}, ["007", "1.10", "True"]),
        (
            {
                "columns": {
                    "text": {"column": "label", "values": {"007": "a", "1.1": "b", "true": "c"}},
                    "label": "label",
                }
            },
            ["a", "b", "c"],
        ),
        ({"columns": {"text": "label", "label": "text"}, "where": ['label in ["007", "1.10"]']}, ["007", "1.10"]),
        ({"columns": {"text": "label", "label": "text"}, "where": ["text <= 1"]}, ["007", "1.10"]),
    ],
)
def test_maps_read_texts(tmp_path, section, values):
    assert loaded(tmp_path, ["007", "1.10", "True"], map=section).train.rows["text"][:] == values


@pytest.mark.parametrize("dtype", [None, "int32"])
def test_a_data_set_of_csv_files(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "set").mkdir()
    csv_file(tmp_path / "set" / "train.csv", ["007", "10"])
    if dtype:
        card = "---\ndataset_info:\n  features:\n  - name: text\n    dtype: string\n  - name: label\n    dtype: int32\n"
        (tmp_path / "set" / "README.md").write_text(f"{card}---\n")
    data = HubData(source="hub", name=str(tmp_path / "set"), validation=None)
    rows = load_splits(data, columns=COLUMNS, kinds=KINDS).train.rows
    assert rows["label"][:] == ([7, 10] if dtype else ["007", "10"]), "a card may name the types"
