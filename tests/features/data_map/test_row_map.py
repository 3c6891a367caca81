from __future__ import annotations

import json
import pickle
import re
from decimal import Decimal
from typing import Any

import datasets
import pytest

from trainer.base.errors import DataError, RecipeError
from trainer.data.sources import load_splits
from trainer.features.data_map import source_map
from trainer.features.data_map.row_map import RowMap
from trainer.features.data_map.section import DataMap
from trainer.recipe.reading.loading import load_recipe
from trainer.recipe.schema import FileData, FolderData

ROWS = [
    {"title": "one", "body": "more", "stars": 5, "language": "en"},
    {"title": "zwei", "body": None, "stars": 1, "language": "de"},
    {"title": "three", "body": " ", "stars": 1, "language": "en"},
    {"title": "four", "body": "text", "stars": 3, "language": None},
]
LABELS = {"column": "stars", "values": {"1": "bad", "3": "fair", "5": "good"}}


def write(name: str, rows: list[dict[str, Any]]) -> str:
    with open(name, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return name


def mapped(columns: dict[str, Any] | None = None, where: list[str] = (), rows=ROWS, **options: Any):  # type: ignore[assignment]
    section = DataMap.model_validate({"columns": columns, "where": list(where)})
    return load_splits(FileData(source="files", train=write("rows.jsonl", rows), map=section, **options))


@pytest.mark.parametrize("in_memory", [True, False])
def test_columns_are_renamed_chosen_cast_made_and_looked_up(in_folder, monkeypatch, in_memory):
    if not in_memory:
        monkeypatch.setattr(source_map, "_IN_MEMORY_BYTES", 0)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", in_folder)
    columns = {
        "text": "{title}[: {body}]",
        "name": "title",
        "label": LABELS,
        "score": {"column": "stars", "type": "number"},
        "id": {"column": "stars", "type": "text"},
    }
    for _ in range(2):  # the second time from the file
        rows = mapped(columns).train.rows
        assert set(rows.column_names) == set(columns), "all others are left out"
        assert rows["text"][:] == ["one: more", "zwei", "three", "four: text"]
        assert rows["name"][:] == ["one", "zwei", "three", "four"]
        assert rows["label"][:] == ["good", "bad", "bad", "fair"]
        assert rows["score"][:] == [5.0, 1.0, 1.0, 3.0]
        assert rows["id"][:] == ["5", "1", "1", "3"]


def made_of(rows: list[dict[str, Any]], columns: dict[str, Any]) -> list[dict[str, Any]]:
    section, values = DataMap.model_validate({"columns": columns}), {name: [rows[0][name]] for name in rows[0]}
    found = RowMap.of(section, list(columns), values, "rows")
    assert found is not None
    return found.of_rows(rows, 0, "rows")


def test_flags_become_names_and_numbers_may_have_a_decimal_comma(in_folder):
    rows = [
        {"text": "a", "toxic": 1, "rude": "1", "score": "1.234,5", "price": Decimal("2.50")},
        {"text": "b", "toxic": 0, "rude": "0", "score": "-0,25", "price": Decimal("3.00")},
    ]
    flags = {"flags": ["toxic", "rude"]}
    columns = {
        "labels": flags,
        "score": {"column": "score", "type": "number", "decimal": ","},
        "price": {"column": "price", "type": "number"},
    }
    assert made_of(rows, columns) == [
        {"labels": ["toxic", "rude"], "score": 1234.5, "price": 2.5},
        {"labels": [], "score": -0.25, "price": 3.0},
    ]
    one = {"label": {"flags": ["toxic", "mild"], "exactly_one": True}}
    rows = [{"toxic": True, "mild": 0.0}, {"toxic": False, "mild": 1.0}]
    assert made_of(rows, one) == [{"label": "toxic"}, {"label": "mild"}]
    with pytest.raises(DataError, match=r"row 1 of rows: columns are 1: `toxic`, `mild`; `exactly_one` needs one"):
        made_of([{"toxic": 1, "mild": 1}], one)
    split = mapped({"text": "title", "labels": {"flags": ["x", "y"]}}, rows=[{"title": "t", "x": 0, "y": 1}]).train
    assert split.rows[0] == {"text": "t", "labels": ["y"]}


@pytest.mark.parametrize(
    ("text", "marks", "number"),
    [
        ("1,234.5", {"thousands": ","}, 1234.5),
        ("-12", {"thousands": ","}, -12.0),
        (" 1\u202f234,5 ", {"thousands": " ", "decimal": ","}, 1234.5),
        ("1\u2019234", {"thousands": "'"}, 1234.0),
        ("1,23", {"thousands": ","}, None),
        ("1234,567", {"thousands": ","}, None),
    ],
)
def test_marks_of_thousands_are_read(text, marks, number):
    columns = {"n": {"column": "a", "type": "number", **marks}}
    if number is not None:
        assert made_of([{"a": text}], columns) == [{"n": number}]
        return
    with pytest.raises(DataError, match="between groups of three digits"):
        made_of([{"a": text}], columns)


@pytest.mark.parametrize(
    ("condition", "kept"),
    [
        ("language == en", [0, 2]),
        ('language != "en"', [1, 3]),
        ("language == null", [3]),
        ("stars >= 3", [0, 3]),
        ("stars < 3.5", [1, 2, 3]),
        ("stars in [1, 5]", [0, 1, 2]),
        ('language not in ["en", null]', [1]),
        ("language > a", [0, 1, 2]),
    ],
)
def test_conditions_choose_rows(in_folder, condition, kept):
    splits = mapped(where=[condition])
    assert splits.train.rows["title"][:] == [ROWS[row]["title"] for row in kept]
    assert splits.notes == (f"{4 - len(kept)} of 4 rows of `rows.jsonl` are left out by `data.map.where`",)
    assert splits.train.where == "the filtered rows of `rows.jsonl`"


def test_errors_behind_a_filter_name_the_line_of_the_file(in_folder):
    split = mapped({"text": "{title}"}, ["stars == 1"]).train
    message = r"row 2 \(line 3\) of the filtered rows of `rows.jsonl` is bad"
    with pytest.raises(DataError, match=message), split.explains_rows():
        raise DataError(f"row 2 of {split.where} is bad")


@pytest.mark.parametrize(
    ("columns", "where", "message"),
    [
        ({"text": "titel"}, [], "`data.map.columns.text` names the column `titel`, but `rows.jsonl` has none"),
        ({"text": "{titel}"}, [], "its columns are `title`, `body`, `stars`, `language`"),
        (None, ["star > 1"], "`data.map.where` names the column `star`, but `rows.jsonl` has none"),
        (
            {"text": "{title} {body}"},
            [],
            "row 2 of `rows.jsonl`: column `body` must be a text or a number",
        ),
        ({"n": {"column": "title", "type": "integer"}}, [], "row 1 of `rows.jsonl`: column `title` must be an integer"),
        ({"n": {"column": "title", "type": "boolean"}}, [], "must be true or false, but is 'one'"),
        ({"n": {"column": "title", "type": "number"}}, ["stars == 1"], "row 2 of `rows.jsonl`: column `title`"),
        (
            {"label": {"column": "stars", "values": {"1": "bad"}}},
            [],
            "`stars` is 5, which `values` does not have",
        ),
        (
            {"n": {"column": "title", "type": "number", "decimal": ","}},
            [],
            "a number with a decimal comma, but is 'one'",
        ),
        (
            {"n": {"column": "title", "type": "number", "thousands": ","}},
            [],
            "a number with ',' between groups of three digits, but is 'one'",
        ),
        ({"n": {"flags": ["stars", "title"]}}, [], "row 1 of `rows.jsonl`: column `stars` must be 0 or 1, but is 5"),
        (None, ["language > 3"], "row 1 of `rows.jsonl` is 'en', a text, and is compared with 3, a number"),
        (None, ["stars > 5"], "`data.map.where` must keep a row, but no row of `rows.jsonl` fulfils ['stars > 5']"),
    ],
)
def test_a_map_that_does_not_fit_is_refused_with_its_row(in_folder, columns, where, message):
    with pytest.raises(DataError, match=re.escape(message)):
        mapped(columns, where)


def test_a_column_decides_on_parts_without_being_written(in_folder):
    template = "Read[{?body} {title} and the text][{!body} {title}].[ {language}]"
    rows = mapped({"text": template}).train.rows
    assert rows["text"][:] == [
        "Read one and the text. en",
        "Read zwei. de",
        "Read three. en",
        "Read four and the text.",
    ]


def test_items_of_lists_are_written(in_folder):
    rows = [{"turns": [{"text": "a"}, {"text": f"b{row}"}], "tags": ["x", "y"]} for row in range(2)]
    found = mapped({"text": "{tags[0]}: {turns[1].text}"}, rows=rows).train.rows
    assert found["text"][:] == ["x: b0", "x: b1"]
    for item in ("turns[2].text", "turns[1].size", "tags[0].text"):
        name, _, place = item.partition("[")
        with pytest.raises(DataError, match=re.escape(f"column `{name}` has no [{place}")):
            mapped({"text": f"{{{item}}}"}, rows=rows)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ('data.map.columns={"text": "{a"}', "`data.map.columns.text` has a single `{`"),
        ('data.map.columns={"text": "{}"}', "has `{}` without a column"),
        ('data.map.columns={"text": "[{?}]"}', "has `{?}` without a column"),
        ('data.map.columns={"text": "{?a}"}', "has `{?a}` outside of an optional part"),
        ('data.map.columns={"text": "{a}[b"}', "has a `[` without `]`"),
        ('data.map.columns={"text": "{a}[b]"}', "has an optional part without a column"),
        ('data.map.columns={"text": "[{a}[{b}]]"}', "has an optional part within another one"),
        ('data.map.columns={"text": "{a}]"}', "has a single `]`"),
        ('data.map.columns={"m": [{"role": "user", "content": "{"}]}', "`data.map.columns.m[0].content` has a single"),
        ('data.map.columns={"n": {"column": "a", "type": "text", "values": {"1": 2}}}', "has `type` and `values`"),
        ('data.map.columns={"n": {"column": "a", "values": {"1": 2, "2": "b"}}}', "has `values` of several types"),
        ('data.map.where=["a"]', "`data.map.where[0]` must compare a column with a value"),
        ('data.map.where=["a < null"]', "must compare by < with a number or a text"),
        ('data.map.where=["a in 3"]', "must compare by in with a list"),
        ('data.map={"shape": "alpaca", "columns": {"a": "b"}}', '`data.map.shape` is "alpaca", which stands for'),
        ('data.map.columns={"n": {"column": "a", "decimal": ","}}', "has `decimal`, which applies to `type` number"),
        (
            'data.map.columns={"n": {"column": "a", "thousands": ","}}',
            "has `thousands`, which applies to `type` number",
        ),
        (
            'data.map.columns={"n": {"column": "a", "type": "number", "thousands": "."}}',
            "has '.' as `decimal` and as `thousands`",
        ),
        ('data.map.columns={"n": {"flags": ["a", "a"]}}', "`data.map.columns.n.flags` has a column twice"),
        ('data.map.columns={"n": {"colum": "a"}}', "`data.map.columns.n.colum`"),
        ("data.maps=[{}, {}]", "`data.maps` has 2 maps, but `data.train` has entries: 1; give each one map"),
        ('data.maps=[{"where": ["a"]}]', "`data.maps[0].where[0]` must compare a column with a value"),
    ],
)
def test_a_malformed_map_is_refused_by_the_recipe(override, message):
    with pytest.raises(RecipeError) as caught:
        load_recipe("bert_sample", [override])
    assert message in str(caught.value)


def test_braces_and_brackets_can_be_characters(in_folder):
    rows = mapped({"text": "[[INST]] {{{title}}}[ [[{body}]]]"}).train.rows
    assert rows["text"][0] == "[INST] {one} [more]"
    assert rows["text"][1] == "[INST] {zwei}"


def test_a_map_is_the_same_in_each_source_and_split(in_folder):
    columns = {"text": "{title}", "label": LABELS}
    splits = mapped(columns, ["stars < 5"], validation=write("other.jsonl", ROWS[1:]))
    assert splits.validation.rows.to_list() == splits.train.rows.to_list()
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk("saved")
    section = DataMap.model_validate({"columns": columns, "where": ["stars < 5"]})
    saved = load_splits(FolderData(source="folder", path="saved", validation=None, map=section))
    assert saved.train.rows.to_list() == splits.train.rows.to_list()
    held = mapped(columns, ["stars < 5"], validation=0.4)
    assert len(held.train.rows) + len(held.validation.rows) == 3


def test_entries_of_a_mixture_keep_their_rows_and_lines(in_folder):
    other = write("other.jsonl", [{"title": f"other {number}", "stars": number % 2} for number in range(4)])
    section = DataMap.model_validate({"columns": {"text": "title"}, "where": ["stars == 1"]})
    train = [write("rows.jsonl", ROWS), other]
    split = load_splits(FileData(source="files", train=train, mixture=[1, 1], map=section)).train
    assert split.rows["text"][:] == ["zwei", "three", "other 1", "other 3"]
    assert split.sources == (2, 2)
    assert split.places.of(3) == "line 4 of `other.jsonl`"


def test_each_entry_may_have_a_map_of_its_own(in_folder):
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    train = [
        write("plain.jsonl", [{"messages": chat}] * 2),
        write("alpaca.jsonl", ALPACA),
        write("asked.jsonl", [{"q": "Why?", "a": "So.", "kept": 1}, {"q": "Who?", "a": "Me.", "kept": 0}]),
    ]
    columns = {"messages": [{"role": "user", "content": "{q}"}, {"role": "assistant", "content": "{a}"}]}
    maps = [{}, {"shape": "alpaca"}, {"columns": columns, "where": ["kept == 1"]}]
    keys = {"source": "files", "train": train, "maps": maps}
    splits = load_splits(FileData.model_validate(keys), columns=["messages"])
    chats = splits.train.rows["messages"][:]
    assert [one[0]["content"] for one in chats] == ["Hi"] * 2 + [
        "Make it shorter.\na very long line",
        *("Name a colour.", "Why?"),
    ]
    assert splits.train.sources == ()
    assert splits.train.places.of(4) == "line 1 of `asked.jsonl`"
    mixed = load_splits(FileData.model_validate({**keys, "mixture": [1, 1, 2]}), columns=["messages"], most_rows=1)
    assert mixed.train.sources == (2, 2, 1)
    del columns["messages"]
    columns["messages"] = "answer"
    with pytest.raises(
        DataError, match=r"`data.maps\[2\].columns.messages` names the column `answer`, but `asked.jsonl`"
    ):
        load_splits(FileData.model_validate({**keys, "maps": [{}, {}, {"columns": columns}]}), columns=["messages"])
    with pytest.raises(DataError, match=r"cannot be read: .*; `data.maps` reads each entry of `data.train` by itself"):
        load_splits(FileData.model_validate({**keys, "maps": None}), columns=["messages"])
    (in_folder / "asked.jsonl").write_text("{")
    with pytest.raises(DataError, match=r"line 1 of `asked.jsonl` is not JSON: [^;]*$"):
        load_splits(FileData.model_validate({**keys, "maps": None}), columns=["messages"])


def test_a_process_that_prepares_batches_gets_all_of_a_map():
    found = RowMap({"text": "{title}"}, notes=("a note",), key="data.maps[1]")
    again = pickle.loads(pickle.dumps(found))
    assert (again.columns, again.notes, again.key) == (found.columns, found.notes, found.key)
    assert again.of_rows([{"title": "one"}], 0, "rows") == [{"text": "one"}]


SHAREGPT = {
    "conversations": [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "Echo hi"},
        {"from": "function_call", "value": '{"name": "echo", "arguments": {"text": "hi"}}'},
        {"from": "observation", "value": "hi"},
        {"from": "gpt", "value": "It said hi."},
    ],
    "tools": '[{"name": "echo"}]',
    "system": "only if the chat has none",
    "id": "3f",
}
CALL = {"type": "function", "function": {"name": "echo", "arguments": {"text": "hi"}}}
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Echo hi"},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "content": "hi"},
    {"role": "assistant", "content": "It said hi."},
]
ALPACA = [
    {"instruction": "Make it shorter.", "input": "a very long line", "output": "a line"},
    {"instruction": "Name a colour.", "input": "", "output": "blue"},
]


def shaped(rows: list[dict[str, Any]], wanted: tuple[str, ...], **section: Any):
    data = FileData(source="files", train=write("rows.jsonl", rows), map=DataMap.model_validate(section))
    splits = load_splits(data, columns=wanted)
    return splits.train.rows, splits.notes


@pytest.mark.parametrize("column", ["messages", "conversations"])
@pytest.mark.parametrize("section", [{}, {"shape": "sharegpt"}])
def test_sharegpt_is_recognised_or_forced(in_folder, column, section):
    rows, notes = shaped([SHAREGPT], (column,), **section)
    assert rows[column][0] == MESSAGES
    note = f"`{column}` of `rows.jsonl`: chats in the shape of ShareGPT are read as messages"
    assert notes == (note, "columns of `rows.jsonl` that are not read: `id`")
    for first, content in ((1, "Echo hi"), (4, "It said hi.")):
        row = {**SHAREGPT, "system": "Be kind.", "conversations": SHAREGPT["conversations"][first:]}
        rows, _ = shaped([row], (column,), **section)
        assert [rows[column][0][place].get("content") for place in (0, 1)] == ["Be kind.", content]
        assert "system" not in rows.features, "no note on an unread column"


def test_preferences_in_the_shape_of_sharegpt(in_folder):
    chat = [{"from": "human", "value": "Name a colour."}]
    row = {"conversations": chat, **{name: {"from": "gpt", "value": name} for name in ("chosen", "rejected")}}
    rows, _ = shaped([row, row], ("conversations", "chosen", "rejected"))
    assert rows["conversations"][1] == [{"role": "user", "content": "Name a colour."}]
    assert rows["rejected"][1] == [{"role": "assistant", "content": "rejected"}]


def test_alpaca_becomes_chats_or_completions(in_folder):
    rows, notes = shaped(ALPACA, ("messages",))
    assert rows["messages"][:] == [
        [{"role": "user", "content": "Make it shorter.\na very long line"}, {"role": "assistant", "content": "a line"}],
        [{"role": "user", "content": "Name a colour."}, {"role": "assistant", "content": "blue"}],
    ]
    assert notes == ("`messages` of `rows.jsonl`: made from the columns of Alpaca",)
    rows, _ = shaped(ALPACA, ("prompt", "completion"), shape="alpaca")
    assert rows["prompt"][0] == "Make it shorter.\na very long line"
    assert rows["completion"][:] == ["a line", "blue"]
    rows, _ = shaped([{**ALPACA[0], "system": "Be brief."}, {**ALPACA[1], "system": ""}], ("messages",))
    assert [chat[0]["role"] for chat in rows["messages"]] == ["system", "user"]
    turns = [
        {**row, "history": history, "text": "x"} for row, history in zip(ALPACA, ([["Hi", "Hello"]], None), strict=True)
    ]
    rows, notes = shaped(turns, ("messages",))
    assert [message["content"] for message in rows["messages"][0]][:2] == ["Hi", "Hello"]
    assert [len(chat) for chat in rows["messages"]] == [4, 2]
    assert notes[1] == "columns of `rows.jsonl` that are not read: `text`"
    assert "`history`, `text`" in shaped(turns, ("prompt", "completion"))[1][1]
    turns[1]["history"] = [["Hi"]]
    with pytest.raises(DataError, match=r"row 2 of `rows.jsonl`: column `history` must be a list of pairs"):
        shaped(turns, ("messages",))


def test_a_shape_that_the_rows_do_not_have_is_refused(in_folder):
    with pytest.raises(DataError, match=r"`data.map.shape` is alpaca, but the rows of `rows.jsonl` have another shape"):
        shaped(ROWS, ("messages",), shape="alpaca")
    rows, notes = shaped(ALPACA, ("messages",), shape="none")
    assert "messages" not in rows.features
    assert not notes


def test_messages_with_other_keys(in_folder):
    chat = [{"speaker": "Kundin", "text": "Hallo", "time": 3}, {"speaker": "bot", "text": None}]
    keys = {"role": "speaker", "content": "text", "roles": {"Kundin": "user", "bot": "assistant"}}
    columns = {"messages": {"column": "talk", "chat": keys}}
    rows, _ = shaped([{"talk": chat}], ("messages",), columns=columns)
    question, answer = rows["messages"][0]
    assert question == {"role": "user", "content": "Hallo", "time": 3}
    assert (answer["role"], answer["content"]) == ("assistant", None)
    columns["messages"]["chat"]["drop"] = ["time"]
    rows, _ = shaped([{"talk": chat}], ("messages",), columns=columns)
    assert rows["messages"][0][0] == {"role": "user", "content": "Hallo"}
    with pytest.raises(DataError, match=r"row 1 of `rows.jsonl`: message 1 has no `who`; its keys are speaker, text"):
        shaped([{"talk": chat}], (), columns={"m": {"column": "talk", "chat": {"role": "who"}}})
    broken = [{"from": "function_call", "value": "echo(hi)"}]
    with pytest.raises(DataError, match="message 1 must hold calls of tools as JSON"):
        shaped([{"conversations": broken}], ("messages",))


def test_rows_to_predict_need_no_answers_and_are_not_filtered():
    section = DataMap.model_validate(
        {
            "columns": {
                "messages": [{"role": "user", "content": "{q}"}, {"role": "assistant", "content": "{a}"}],
                "label": "stars",
            },
            "where": ["stars > 3"],
        }
    )
    found = RowMap.of_input(section, ("messages",), [{"q": "why"}], "`x`")
    assert found.of_rows([{"q": "why"}, {"q": "how"}], 0, "`x`") == [
        {"messages": [{"role": "user", "content": "why"}]},
        {"messages": [{"role": "user", "content": "how"}]},
    ]
    found = RowMap.of_input(DataMap(), ("messages",), [{"instruction": "why"}], "`x`")
    assert found.of_rows([{"instruction": "why"}], 0, "`x`")[0]["messages"] == [{"role": "user", "content": "why"}]


def deep() -> list[Any]:
    """Return a value of 100,000 levels."""
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    return value


_CHAT = {"role": "from", "content": "value", "roles": {"function_call": "tool_calls"}}


@pytest.mark.parametrize("kind", ["template", "number", "calls"])
def test_values_that_are_too_deep_or_too_large_are_named(kind):
    column, value = {
        "template": ("{a}", deep()),
        "number": ({"column": "a", "type": "number"}, 10**400),
        "calls": ({"column": "a", "chat": _CHAT}, [{"from": "function_call", "value": "[" * 100_000}]),
    }[kind]
    section, rows = DataMap.model_validate({"columns": {"text": column}}), [{"a": value}]
    row_map = RowMap.of_input(section, ["text"], rows, "x.jsonl")
    assert row_map is not None
    with pytest.raises(DataError, match=r"`data\.map\.columns\.text`, row 7 of x\.jsonl: "):
        row_map.of_rows(rows, 6, "x.jsonl")


def test_a_condition_on_a_value_that_is_too_deep_is_named():
    section = DataMap.model_validate({"columns": {"text": "a"}, "where": ["a == 3"]})
    columns = {"a": [deep()]}
    row_map = RowMap.of(section, ["text"], columns, "x.jsonl")
    assert row_map is not None
    with pytest.raises(DataError, match=r"`data\.map\.where`: column `a`, row 1 of x\.jsonl"):
        row_map.keeps(columns, [0], "x.jsonl")


ALIKE, TYPED = {"column": "text", "values": {"a": 1}}, {"column": "text", "type": "text"}


@pytest.mark.parametrize(
    ("good", "bad", "section", "condition"),
    [
        ({"label": "a"}, {"label": None}, {}, "label != null"),
        ({"label": "a"}, {"label": None}, {"where": ["text != x"]}, 'text != x", "label != null'),
        ({"label": "a"}, {"label": " "}, {}, r"label != \" \""),
        ({"label": 1.5}, {"label": float("nan")}, {}, "label < Infinity"),
        ({" r ": "a"}, {" r ": None}, {"columns": {"text": "text", "label": " r "}}, r"\" r \" != null"),
        ({}, {"text": None}, {"columns": {"label": ALIKE}}, "text != null"),
        ({}, {"text": ""}, {"columns": {"label": TYPED}}, None),
        ({}, {}, {"columns": {"label": "[{text}]"}}, None),
        ({"label": "a"}, {"label": "x"}, {}, None),
    ],
)
def test_an_error_names_the_condition_that_leaves_the_row_out(tmp_path, good, bad, section, condition):
    rows = [{"text": "a", **good}, {"text": "a", **bad}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = FileData(source="files", train=str(tmp_path / "a.jsonl"), map=section)
    split = load_splits(data).train
    with pytest.raises(DataError) as caught, split.explains_rows():
        raise DataError(f"column `label`, row 2 of {split.where} is null")
    found = str(caught.value)
    if condition is None:
        assert found.endswith("is null")
        return
    line = f'["{condition}"]'
    assert found.endswith(f"; to leave such rows out, set `data.map.where` to {line}")
    kept = DataMap.model_validate({**section, "where": json.loads(line)})
    assert len(load_splits(data.model_copy(update={"map": kept})).train.rows) == 1
