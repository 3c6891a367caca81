"""Real shapes of data sets, and the task that `trainer init` proposes for each."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import datasets
import pytest

from trainer.tools.init.columns import columns_of
from trainer.tools.init.shapes import Shape, notes, shapes

CLASSES = "sequence_classification"
CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def rows_of(number: int, **columns: Any) -> list[dict[str, Any]]:
    """Make rows; a list gives the values in turn, and a text differs in each row."""

    def value(given: Any, row: int) -> Any:
        return (
            given[row % len(given)]
            if isinstance(given, tuple)
            else f"{given} {row}"
            if isinstance(given, str)
            else given
        )

    return [{name: value(given, row) for name, given in columns.items()} for row in range(number)]


@pytest.mark.parametrize(
    ("rows", "task"),
    [
        (rows_of(30, text="t", label=("a", "b")), {"type": CLASSES, "text": "text", "label": "label"}),
        (rows_of(30, text="t", label=(True, False)), {"type": CLASSES, "text": "text", "label": "label"}),
        (rows_of(30, premise="p", hypothesis="h", label=(0, 1, 2)), {"text": ["premise", "hypothesis"]}),
        (rows_of(30, review="t", stars=(1, 2, 5)), {"type": CLASSES, "labels": ["1", "2", "5"], "label": "stars"}),
        (rows_of(30, text="t", label=(0.0, 1.0, None)), {"type": CLASSES, "label": "label"}),
        (rows_of(30, id=tuple(range(30)), s="t", long="a long text", Kind=("a", "b")), {"text": "long"}),
        (rows_of(30, text="t", labels=(["a"], ["a", "b"], [])), {"type": CLASSES, "multi_label": True}),
        (rows_of(2000, text="t", label=tuple(f"class {i}" for i in range(1000))), {"type": CLASSES, "label": "label"}),
        (rows_of(30, text="t", label="each another"), {"type": "causal_lm", "text": "text"}),
        (rows_of(30, text="t", score=(0.5, 1.25)), {"type": "sequence_regression", "label": "score"}),
        (rows_of(30, text="t", price=tuple(range(7, 37))), {"type": "sequence_regression", "label": "price"}),
        (rows_of(30, line="t"), {"type": "causal_lm", "text": "line"}),
        (rows_of(3, messages=CHAT), {"type": "causal_lm", "messages": "messages"}),
        (rows_of(3, messages=CHAT, tools=[{"type": "function"}]), {"messages": "messages", "tools": "tools"}),
        (rows_of(3, conversations=[{"from": "human", "value": "a"}]), {"messages": "conversations"}),
        (rows_of(3, instruction="a", input="", output="b"), {"prompt": "prompt", "completion": "completion"}),
        (rows_of(3, anchor="a", positive="b", negative="c"), {"texts": ["anchor", "positive", "negative"]}),
        (rows_of(3, query="a", document="b"), {"type": "embedding", "texts": ["query", "document"]}),
        (rows_of(3, name="a", s="b", negative_1="c", neg2="d"), {"texts": ["name", "s", "negative_1", "neg2"]}),
        (rows_of(3, q="a", r="b", w="c", m=[2.5, 0.5]), {"texts": ["q", "r", "w"], "score": "m", "loss": "margin_mse"}),
        (rows_of(3, text="a", shares=[0.25, 0.75]), {"type": CLASSES, "probabilities": "shares", "labels": ["0", "1"]}),
        (rows_of(3, text="a", label=("a", "b"), p={"a": 0.5, "b": 0.5}), {"probabilities": "p", "labels": ["a", "b"]}),
        (rows_of(3, text=("a.png", "b"), label=("a", "b")), {"type": CLASSES, "text": "text"}),
        (rows_of(3, text="t", url=("http://a/1.png",), label=("a", "b")), {"type": CLASSES, "text": "text"}),
    ],
    ids=lambda value: None if isinstance(value, list) else "-".join(map(str, value.values()))[:40],
)  # fmt: skip
def test_the_first_proposal(rows: list[dict[str, Any]], task: dict[str, Any]) -> None:
    found = shapes(columns_of(datasets.Dataset.from_list(rows), 10_000))
    assert found[0].task.items() >= task.items()


def one_of(rows: list[dict[str, Any]], given: dict[str, Any] | None = None) -> Shape:
    return shapes(columns_of(datasets.Dataset.from_list(rows), 10_000), given)[0]


def test_columns_of_texts_fit_all_kinds_of_embeddings() -> None:
    rows = datasets.Dataset.from_list(rows_of(3, query="a", positive="b", negative="c"))
    first = {shape.type: shape.task for shape in reversed(shapes(columns_of(rows, 10)))}
    for kind in ("embedding", "sparse_embedding", "multi_vector_embedding"):
        assert first[kind] == {"type": kind, "texts": ["query", "positive", "negative"]}


def test_a_given_label_comes_before_probabilities() -> None:
    rows = rows_of(3, text="a", label=("a", "b"), probabilities={"a": 0.25, "b": 0.75})
    assert "probabilities" not in one_of(rows, {"label": "label"}).task


FLAGS = rows_of(30, id=tuple(range(30)), comment="c", toxic=(0, 1, 0), rude=(0, 1, 1), threat=(0,))


@pytest.mark.parametrize(
    ("rows", "task", "made"),
    [
        (
            FLAGS,
            {"type": CLASSES, "text": "comment", "label": "labels", "labels": ["toxic", "rude", "threat"],
             "multi_label": True},
            {"comment": "comment", "labels": {"flags": ["toxic", "rude", "threat"]}},
        ),
        (
            rows_of(30, text="t", cat=(True, False, False), dog=(False, True, False), cow=(False, False, True)),
            {"type": CLASSES, "label": "labels", "labels": ["cat", "dog", "cow"]},
            {"text": "text", "labels": {"flags": ["cat", "dog", "cow"], "exactly_one": True}},
        ),
        (rows_of(30, text="t", a=(0, 1), b=(1, 0, 0), label=(0, 1, 1)), {"type": CLASSES, "label": "label"}, None),
        (
            rows_of(30, text="t", score=("0,5", "1,25", "-3", "1.234,5")),
            {"type": "sequence_regression", "label": "score"},
            {"text": "text", "score": {"column": "score", "type": "number", "decimal": ","}},
        ),
        *(
            (
                rows_of(30, text="t", score=values),
                {"type": "sequence_regression", "label": "score"},
                {"text": "text", "score": {"column": "score", "type": "number", **marks}},
            )
            for values, marks in {
                ("1,137", "950", *(f"1,{i}" for i in range(100, 127))): {"thousands": ","},
                ("1,137.5", "950"): {"thousands": ","},
                ("0,137", "1,250"): {"decimal": ","},
                ("1 234,5", "7\u202f654,25"): {"decimal": ",", "thousands": " "},
                ("1'234.5", "2\u2019000.25"): {"thousands": "'"},
                ("1.234.567,5", "3"): {"decimal": ","},
                ("0.5", "n/a", "-", " ", "1.25"): {},
            }.items()
        ),
        (
            rows_of(30, text="t", score=("0.5", "1.25")),
            {"type": "sequence_regression"},
            {"text": "text", "score": {"column": "score", "type": "number"}},
        ),
        (
            rows_of(30, text="t", price=(Decimal("0.50"), Decimal("1.25"), None)),
            {"type": "sequence_regression", "label": "price"},
            {"text": "text", "price": {"column": "price", "type": "number"}},
        ),
        (
            rows_of(30, text="t", stars=(Decimal("1.00"), Decimal("2.00"))),
            {"type": CLASSES, "label": "stars", "labels": ["1", "2"]},
            {"text": "text", "stars": {"column": "stars", "type": "number"}},
        ),
        (rows_of(30, text="t", label=(1.0, 2.0, 3.0)), {"type": CLASSES, "labels": ["1", "2", "3"]}, None),
        (
            rows_of(100, User=tuple(f"u{i}" for i in range(37)), **{"Sentiment (manual)": ("a", "b")}, t="t"),
            {"type": CLASSES, "label": "Sentiment (manual)", "text": "t"},
            None,
        ),
        (rows_of(30, Stimmung=("gut", "schlecht"), t="t", ort=("a", "b")), {"label": "Stimmung"}, None),
        (rows_of(30, sentimentLabel=("a", "b"), t="t", city=("x", "y")), {"label": "sentimentLabel"}, None),
        (rows_of(30, ItemID=tuple(range(7, 37)), t="t", mood=("x", "y")), {"label": "mood"}, None),
        (rows_of(30, n=tuple(range(1, 31)), t="t", mood=("x", "y")), {"label": "mood"}, None),
        (rows_of(30, text="t", author=("x", "y")), {"type": "causal_lm"}, None),
        (rows_of(30, comment_id="c", Reviewer="a person", comment="t", mood=("x", "y")), {"text": "comment"}, None),
        (
            rows_of(30, key=tuple(f"{i:016x}a" for i in range(30)), t="t", mood=("x", "y")),
            {"text": "t", "label": "mood"},
            None,
        ),
        (
            rows_of(30, **{"Sentence 1": "p", "Sentence 2": "h"}, label=("a", "b")),
            {"text": ["Sentence 1", "Sentence 2"]},
            None,
        ),
        (rows_of(30, text="t", mail=("a@b.de", "b@b.de")), {"type": "causal_lm"}, None),
        (rows_of(30, text="t", day=("2024-01-02", "2024-01-03")), {"type": "causal_lm"}, None),
        (rows_of(30, text="t", label=("007", "01", "10")), {"type": CLASSES, "label": "label"}, None),
        (rows_of(30, text="t", labels=("['a', 'b']", "[]", '{"a": 1}')), {"type": "causal_lm"}, None),
        (rows_of(30, text="t", label=("None", "mild", "NA")), {"type": CLASSES, "label": "label"}, None),
        (rows_of(30, text="t", label=("[POS]", "[NEG]")), {"type": CLASSES, "label": "label"}, None),
    ],
)  # fmt: skip
def test_labels_in_other_forms(rows: list[dict[str, Any]], task: dict[str, Any], made: Any) -> None:
    found = one_of(rows)
    assert found.task.items() >= task.items()
    assert found.columns == made


@pytest.mark.parametrize(
    ("label", "why"),
    [
        (("a",), 'and `label` has one class only, "a":'),
        ("each another", "and the labels in `label` differ in nearly all rows:"),
        (("5 %", "7.5%"), "`label` has 2 classes"),
        (tuple(f"{i} %" for i in range(30)), "and `label` holds percentages:"),
        (("$3.50", "4 €"), "`label` has 2 classes"),
        (tuple(f"${i}.00" for i in range(30)), "and `label` holds amounts of money:"),
        (("bad", *(f"{i}.5" for i in range(29))), 'and `label` holds numbers, but "bad" in 1 of 30 rows:'),
        (None, "and `label` holds no labels (label (empty)):"),
    ],
)
def test_the_reason_names_the_label(label: Any, why: str) -> None:
    rows = rows_of(30, text="t", label=label)
    found = one_of(rows)
    assert why in found.why
    shown = list(notes(columns_of(datasets.Dataset.from_list(rows), 100), found, False))
    assert bool(shown) == ("percent" in why or "money" in why or "numbers" in why or "2 classes" in why)


def test_a_given_label_is_taken_and_others_are_named() -> None:
    rows = rows_of(40, text="t", label=("a", "b", "c"), stars=(1, 3), **{"my user": ("x", "y")})
    columns = columns_of(datasets.Dataset.from_list(rows), 100)
    found = shapes(columns, {"label": "stars"})[0]
    assert found.task == {"type": CLASSES, "text": "text", "label": "stars", "labels": ["1", "3"]}
    assert found.why == "`stars` has 2 classes"
    assert list(notes(columns, found, True)) == ["the task does not read label (text, 3 distinct)"]
    (note,) = notes(columns, shapes(columns)[0], False)
    assert note == "the label may be another column: task.label=stars (integer, 2 distinct)"
    columns = columns[:1] + columns[3:]
    (note,) = notes(columns, shapes(columns)[0], False)
    assert note.endswith("task.type=sequence_classification and 'task.label=my user' (text, 2 distinct)")


@pytest.mark.parametrize(
    ("columns", "label", "note"),
    [
        ({"label": None, "x": ("a", "b")}, "x", "`label` is not taken as the label, since it has one value or none"),
        ({"label": ("a",), "x": ("a", "b")}, "x", "`label` is not taken as the label, since it has one value or none"),
        ({"label": ("a", "b")}, "label", "the task does not read title (text, 30 distinct)"),
        (
            {"label": ("a", "b"), "Split": ("train", "test")},
            "label",
            "the rows of test, train in `Split` are taken tog",
        ),
        (
            {"label": (0, 1, -1)},
            "label",
            "`label` is -1 in 10 rows, which is a class; if it marks rows without a label",
        ),
        ({"label": ("a", "b"), "box": ("[1, 2]", "[]")}, "label", "`box` holds lists or objects written as texts"),
        (
            {"emotion_label": (0, 1), "emotion_name": ("a", "b")},
            "emotion_label",
            "another column: task.label=emotion_n",
        ),
    ],
)
def test_labels_that_are_not_taken_are_noted(columns: dict[str, Any], label: str, note: str) -> None:
    rows = columns_of(datasets.Dataset.from_list(rows_of(30, title="t", long="a longer text", **columns)), 100)
    found = shapes(rows)[0]
    assert (found.task["label"], found.task["text"]) == (label, "long")
    assert note in next(iter(notes(rows, found, False)))


def test_a_comma_that_may_be_a_decimal_one_is_noted() -> None:
    columns = columns_of(
        datasets.Dataset.from_list(rows_of(30, text="t", price=tuple(f"1,{i + 100}" for i in range(30)))), 100
    )
    assert columns[1].values[:2] == [1100, 1101]
    assert "1,100 is read with a separator of thousands" in next(notes(columns, shapes(columns)[0], False))


def test_numbers_alone_have_no_task() -> None:
    assert shapes(columns_of(datasets.Dataset.from_list(rows_of(3, a=(1, 2), b=(0.5, 1.5))), 10)) == []


def test_integers_may_be_classes_or_numbers() -> None:
    found = shapes(columns_of(datasets.Dataset.from_list(rows_of(30, text="t", stars=(1, 2))), 10_000))
    assert [shape.type for shape in found][:2] == [CLASSES, "sequence_regression"]
