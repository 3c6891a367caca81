from __future__ import annotations

import errno
import gzip
import json
import os
import re

import datasets
import pytest

from tests.helpers.rows import load_files, write_rows
from trainer.base.errors import DataError, ExitCode, TrainerError, UsageError
from trainer.data import readers
from trainer.data.sources import load_splits
from trainer.recipe.schema import FileData, FolderData, HubData

ROWS = [{"text": "one", "label": "a"}, {"text": "two", "label": "b"}]


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl", lines(ROWS)),
        ("rows.json", json.dumps(ROWS, indent=1)),
        ("rows.ndjson", lines(ROWS)),
        ("rows.csv", "text,label\none,a\ntwo,b\n"),
    ],
)
def test_text_formats(in_folder, name, content):
    splits = load_files(write_rows(in_folder, name, content))
    assert splits.train.rows.to_list() == ROWS
    assert splits.train.where == f"`{name}`"
    assert splits.validation is None


def test_a_url_is_no_file_of_this_machine():
    with pytest.raises(DataError, match=r"`data.train` must name files of this machine, but names `https:"):
        load_splits(FileData(source="files", train="https://a/b*.csv"))


@pytest.mark.parametrize("filename", [None, "train.jsonl"])
def test_a_fault_of_the_disk_may_pass(in_folder, monkeypatch, filename):
    def fail(path, key):
        raise OSError(errno.ESTALE, "Stale file handle", filename)

    write_rows(in_folder, "train.jsonl", lines([{"text": "a"}]))
    monkeypatch.setattr(readers, "_require_file", fail)
    named = f"`{filename}`" if filename else "one of them"
    message = f"`data.train` must name files that can be read, but {named} cannot be: Stale file handle"
    with pytest.raises(DataError, match=message) as caught:
        load_files("train.jsonl")
    assert caught.value.exit_code == ExitCode.FAILED


def test_parquet_and_a_list_of_files(in_folder):
    datasets.Dataset.from_list(ROWS).to_parquet("a.parquet")
    datasets.Dataset.from_list(ROWS[:1]).to_parquet("b.parquet")
    splits = load_files(["a.parquet", "b.parquet"], "b.parquet")
    assert splits.train.rows["text"][:] == ["one", "two", "one"]
    assert splits.train.where == "`a.parquet`, `b.parquet`"
    assert len(splits.validation.rows) == 1


def test_a_recipe_can_name_the_format(in_folder):
    assert load_files(write_rows(in_folder, "rows.txt", lines(ROWS)), file_format="json").train.rows.to_list() == ROWS


def test_a_file_that_changed_is_read_again(in_folder):
    name = write_rows(in_folder, "rows.jsonl", lines(ROWS))
    assert len(load_files(name).train.rows) == 2
    write_rows(in_folder, name, lines(ROWS * 2))
    assert len(load_files(name).train.rows) == 4


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", "", "`data.train` must hold at least one row, but `rows.jsonl` is empty"),
        ("rows.jsonl", "\n\n", "`data.train` must hold at least one row, but `rows.jsonl` is empty"),
        ("rows.json", "[]", "`data.train` must hold at least one row, but `rows.json` is empty"),
        ("rows.csv", "text,label\n", "`data.train` must hold at least one row, but `rows.csv` is empty"),
        (
            "rows.jsonl",
            lines(ROWS) + '{"text": }\n',
            "line 3 of `rows.jsonl` is not JSON: Expecting value at column 10",
        ),
        ("rows.jsonl", lines(ROWS) + '{"text": "cut', "not JSON: Unterminated string starting at column 10"),
        ("rows.json", '[{"text": "a"},\n{"text" "b"}]', "line 2 of `rows.json` is not JSON: Expecting ':' delimiter"),
        ("rows.jsonl", lines(ROWS) + "3\n", "line 3 of `rows.jsonl` is not a JSON object"),
        ("rows.csv", "text,label\none,a\ntwo,b,c\n", "Expected 2 fields in line 3, saw 3"),
        ("rows.parquet", "no parquet", "`data.train` must hold parquet, but `rows.parquet` cannot be read"),
    ],
)
def test_an_error_of_a_file_names_its_line(in_folder, capfd, name, content, message):
    with pytest.raises(DataError, match=re.escape(message)):
        load_files(write_rows(in_folder, name, content))
    assert capfd.readouterr() == ("", ""), "the message is told once, by us"


def test_files_with_different_columns_are_refused(in_folder):
    names = [
        write_rows(in_folder, "a.jsonl", lines(ROWS)),
        write_rows(in_folder, "b.jsonl", lines([ROWS[0] | {"extra": 1}])),
    ]
    with pytest.raises(DataError, match=r"`a.jsonl`, `b.jsonl` cannot be read: later rows .*: `extra` is new; `data"):
        load_files(names)


def test_missing_files(in_folder):
    with pytest.raises(DataError, match=r"`data.train` must name files, but `none.jsonl` does not exist"):
        load_files("none.jsonl")
    with pytest.raises(DataError, match=r"`data.validation` must name files, but `\.` is a folder"):
        load_files(write_rows(in_folder, "rows.jsonl", lines(ROWS)), ".")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_permission(in_folder):
    name = write_rows(in_folder, "rows.jsonl", lines(ROWS))
    (in_folder / name).chmod(0)
    with pytest.raises(DataError, match=r"`data.train` must name files that can be read"):
        load_files(name)


def test_endings_must_agree(in_folder):
    json_file = write_rows(in_folder, "a.jsonl", lines(ROWS))
    csv_file = write_rows(in_folder, "b.csv", "text,label\none,a\n")
    with pytest.raises(UsageError, match=r"files of one format, but `a.jsonl` is json and `b.csv` is csv"):
        load_files(json_file, csv_file)
    with pytest.raises(UsageError, match=r"`data.format` must be set .* `c.rows`; known endings are .json,"):
        load_files(write_rows(in_folder, "c.rows", "text\tlabel\n"))
    with pytest.raises(UsageError, match=r"token files of nanotron and datatrove \(.ds\) are not read; write"):
        load_files(write_rows(in_folder, "c.ds", "tokens"))


@pytest.fixture
def glue(in_folder):
    """A folder of the shape that `nyu-mll/glue` has on the hub."""
    features = datasets.Features(
        {
            "sentence1": datasets.Value("string"),
            "sentence2": datasets.Value("string"),
            "label": datasets.ClassLabel(names=["not_equivalent", "equivalent"]),
        }
    )
    (in_folder / "glue" / "mrpc").mkdir(parents=True)
    card = ["---", "configs:", "- config_name: mrpc", "  data_files:"]
    for name, labels in {"train": [0, 1], "validation": [1], "test": [-1]}.items():
        rows = {"sentence1": ["a"] * len(labels), "sentence2": ["b"] * len(labels), "label": labels}
        path = f"mrpc/{name}-00000-of-00001.parquet"
        datasets.Dataset.from_dict(rows, features=features).to_parquet(in_folder / "glue" / path)
        card += [f"  - split: {name}", f"    path: {path}"]
    card += ["- config_name: sst2", "  data_files:", "  - split: train", "    path: mrpc/train-*", "---", ""]
    (in_folder / "glue" / "README.md").write_text("\n".join(card))
    return "glue"


def load_hub(name, **keys):
    return load_splits(HubData(source="hub", name=name, **keys))


def test_a_local_folder_of_the_hub_shape(glue):
    splits = load_hub(glue, subset="mrpc")
    assert len(splits.train.rows) == 2
    assert splits.train.where == "split `train` of `glue` (subset `mrpc`)"
    assert splits.validation.rows.features["label"].names == ["not_equivalent", "equivalent"]
    assert load_hub(glue, subset="mrpc", validation=None).validation is None


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "`data.name` and `data.subset` must name a data set, .* pick one among .*mrpc.*sst2"),
        ({"subset": "mprc"}, "`glue` \\(subset `mprc`\\) cannot be read: BuilderConfig 'mprc' not found.*'mrpc'"),
        ({"subset": "sst2"}, "`data.validation` must name a split of .*, but is `validation`; there are `train`$"),
        ({"subset": "mrpc", "train": "all"}, "`data.train` .* but is `all`; there are `train`, `validation`, `test`"),
    ],
)
def test_wrong_subsets_and_splits_list_what_there_is(glue, keys, message):
    with pytest.raises(DataError, match=message):
        load_hub(glue, **keys)


def test_an_unreachable_hub_has_a_remedy(in_folder, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(TrainerError, match=r"the hub cannot be reached; set `data.name` to a local copy"):
        load_hub("nyu-mll/glue", subset="mrpc")


def test_code_that_comes_with_a_data_set_is_not_run(in_folder):
    (in_folder / "evil").mkdir()
    write_rows(in_folder, "evil/evil.py", f"open({str(in_folder / 'ran')!r}, 'w')")
    with pytest.raises(DataError, match="cannot be read"):
        load_hub("evil")
    with pytest.raises(DataError, match="cannot be read"):
        load_hub("evil/evil.py")
    assert not (in_folder / "ran").exists()


def load_folder(path, **keys):
    return load_splits(FolderData(source="folder", path=path, **keys))


def test_a_saved_dataset_dict(in_folder):
    split = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": split, "validation": split.select([0])}).save_to_disk("saved")
    splits = load_folder("saved")
    assert splits.train.rows.to_list() == ROWS
    assert splits.validation.where == "split `validation` of `saved`"
    with pytest.raises(DataError, match=r"`data.train` must name a split of `saved`, but is `all`"):
        load_folder("saved", train="all")


def test_folders_that_hold_something_else(in_folder):
    with pytest.raises(DataError, match=r"`data.path` must be a folder, but there is none at `none`"):
        load_folder("none")
    with pytest.raises(DataError, match=r"cannot be read as one"):
        load_folder(".")
    datasets.Dataset.from_list(ROWS).save_to_disk("single")
    with pytest.raises(DataError, match=r"`single` was written by `save_to_disk` .*; use `data.source` \"folder\""):
        load_splits(HubData(source="hub", name="single"))
    with pytest.raises(DataError, match=r"`data.validation` must name a split of `single`, but is `validation`"):
        load_folder("single")


def test_splits_beside_one_with_a_held_out_share_are_noted(in_folder):
    rows = datasets.Dataset.from_list(ROWS * 2)
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk("saved")
    splits = load_splits(FolderData(source="folder", path="saved", validation=0.5))
    assert splits.notes[0] == "`data.validation` is a share of `train`; other splits of `saved`: `test`"
    assert len(splits.train.rows) == len(splits.validation.rows) == 2


def test_an_empty_split_of_a_saved_folder(in_folder):
    split = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": split.select([]), "validation": split}).save_to_disk("saved")
    with pytest.raises(DataError, match=r"each split with a row, but `saved` cannot be read as one"):
        load_folder("saved")


@pytest.mark.parametrize(
    ("name", "content", "note"),
    [
        ("rows.tsv", "text\tlabel\none\ta\ntwo\tb\n", ()),
        ("rows.csv", "text;label\none;a\ntwo;b\n", ("`data.train`: `rows.csv` is read with semicolons between",)),
        (
            "12.csv",
            "text,label,7.5\none,a,1\ntwo,b,1\n",
            ("`data.train`: the first line of `12.csv` is read as names",),
        ),
        ("rows.csv.gz", gzip.compress(b"text,label\none,a\ntwo,b\n", mtime=0), ()),
        ("rows.jsonl.gz", gzip.compress(lines(ROWS).encode(), mtime=0), ()),
    ],
)
def test_delimiters_are_found_and_named_and_gzip_is_opened(in_folder, name, content, note):
    splits = load_files(write_rows(in_folder, name, content))
    assert splits.train.rows.select_columns(["text", "label"]).to_list() == ROWS
    assert len(splits.notes) == len(note)
    assert all(found.startswith(start) for found, start in zip(splits.notes, note, strict=True))


def test_a_comma_wins_where_texts_hold_other_delimiters(in_folder):
    name = write_rows(in_folder, "rows.csv", 'text,label\n"a; b; c",x\n"d; e; f",y\n')
    expected = [{"text": "a; b; c", "label": "x"}, {"text": "d; e; f", "label": "y"}]
    assert load_files(name).train.rows.to_list() == expected


def test_a_delimiter_and_an_encoding_can_be_set(in_folder):
    write_rows(in_folder, "rows.csv", "text:label\ncafé:a\n".encode("latin-1"))
    keys = {"source": "files", "train": "rows.csv", "delimiter": ":"}
    with pytest.raises(DataError, match=r"encoding utf-8, but `rows.csv` does not; save it as UTF-8, or .*latin-1"):
        load_splits(FileData(**keys))
    write_rows(in_folder, "utf8.csv", "text:label\ncafé:a\n")
    with pytest.raises(DataError, match=r"encoding iso8859-1, but `utf8.csv` is in UTF-8; set `data.encoding` to utf"):
        load_splits(FileData(**{**keys, "train": "utf8.csv"}, encoding="latin-1"))
    splits = load_splits(FileData(**keys, encoding="latin-1"))
    assert splits.train.rows.to_list() == [{"text": "café", "label": "a"}]


def test_names_that_mean_nothing_elsewhere_are_texts(in_folder):
    name = write_rows(in_folder, "rows.csv", "text,label\none,None\ntwo,NA\nthree,null\nfour,\n")
    assert load_files(name).train.rows["label"][:] == ["None", "NA", "null", None]


def test_patterns_and_pointers_of_git_lfs(in_folder):
    for name in ("part-2.jsonl", "part-1.jsonl"):
        write_rows(in_folder, name, lines([{"text": name}]))
    assert load_files("part-*.jsonl").train.rows["text"][:] == ["part-1.jsonl", "part-2.jsonl"]
    with pytest.raises(DataError, match=r"no file matches `none-\*.jsonl`"):
        load_files("none-*.jsonl")
    write_rows(in_folder, "rows.jsonl", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(DataError, match=r"`rows.jsonl` is a pointer of Git LFS; run `git lfs pull`"):
        load_files("rows.jsonl")


def test_a_share_is_held_out_of_each_class(in_folder):
    rows = [{"text": f"text {row}", "label": "rare" if row % 10 == 0 else "usual"} for row in range(200)]
    data = FileData(source="files", train=write_rows(in_folder, "rows.jsonl", lines(rows)), validation=0.1)
    splits, again = load_splits(data, "label"), load_splits(data, "label")
    held = splits.validation.rows["text"][:]
    assert held == again.validation.rows["text"][:]
    assert sorted([*held, *splits.train.rows["text"][:]]) == sorted(row["text"] for row in rows)
    assert splits.validation.rows["label"][:].count("rare") == 2
    assert len(held) == 20
    assert splits.notes == ("validation: 20 of the 200 rows of `rows.jsonl` are held out",)
    many = [{"text": f"text {row}", "label": f"class {row % 50}"} for row in range(200)]
    data = FileData(source="files", train=write_rows(in_folder, "many.jsonl", lines(many)), validation=0.2)
    splits = load_splits(data, "label")
    assert len(splits.validation.rows) == 40
    assert len(set(splits.train.rows["label"])) == 50, "training has each class"
    with pytest.raises(DataError, match=r"`data.validation` is 0.001, but `rows.jsonl` has 200 rows"):
        load_splits(data.model_copy(update={"validation": 0.001, "train": "rows.jsonl"}))


class TestMixture:
    def load(self, folder, **keys):
        for name, number in (("a", 12), ("b-1", 5), ("b-2", 3)):
            rows = [{"text": f"{name} {row}", "label": ["x", "y"][row % 2]} for row in range(number)]
            write_rows(folder, f"{name}.jsonl", lines(rows))
        data = {"source": "files", "train": ["a.jsonl", "b-*.jsonl"], "mixture": [0.7, 0.3], **keys}
        return load_splits(FileData(**data), "label")

    def test_each_entry_is_a_source(self, in_folder):
        train = self.load(in_folder).train
        assert train.sources == (12, 8)
        assert train.rows["text"][11:14] == ["a 11", "b-1 0", "b-1 1"]

    def test_rows_are_held_out_of_sources(self, in_folder):
        train = self.load(in_folder, validation=0.2).train
        in_a = sum(text.startswith("a ") for text in train.rows["text"][:])
        assert train.sources == (in_a, 16 - in_a)
        assert all(text.startswith("a ") for text in train.rows["text"][:in_a])

    @pytest.mark.parametrize(
        ("row", "message"),
        [
            ({"text": [1, 2], "label": "x"}, "must name files with values of the same types in a column"),
            ({"text": "a", "label": "x", "id": 1}, "`a.jsonl` has text, label and `c.jsonl` has text, label, id"),
        ],
    )
    def test_different_columns_are_refused(self, in_folder, row, message):
        write_rows(in_folder, "c.jsonl", lines([row]))
        with pytest.raises(DataError, match=message):
            self.load(in_folder, train=["a.jsonl", "c.jsonl"])

    def test_numbers_are_converted_as_in_one_file(self, in_folder):
        write_rows(in_folder, "one.csv", "text,label\na,1.5\n")
        write_rows(in_folder, "two.csv", "text,label\na,1\n")
        train = self.load(in_folder, train=["one.csv", "two.csv"]).train
        assert train.rows["label"][:] == [1.5, 1.0]

    def test_a_source_may_be_held_out_whole(self, in_folder):
        write_rows(in_folder, "one.jsonl", lines([{"text": "x", "label": "x"}]))
        assert self.load(in_folder, train=["one.jsonl", "b-*.jsonl"], validation=0.8).train.sources[0] == 0
