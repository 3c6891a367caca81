"""Real shapes of data sets, and the task that `trainer init` proposes for each."""

from __future__ import annotations

from typing import Any

import datasets
import pytest

from trainer.tools.init.columns import columns_of
from trainer.tools.init.shapes import shapes

CLASSES = "sequence_classification"
CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
SQUAD = {"id": "1", "title": "t", "context": "a b c", "question": "q", "answers": {"text": ["b"], "answer_start": [2]}}
UNANSWERED = SQUAD | {"answers": {"text": [], "answer_start": []}}


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
        (rows_of(3, prompt="p", chosen="a", rejected="b"), {"type": "preference", "prompt": "prompt"}),
        (rows_of(3, chosen=CHAT, rejected=CHAT), {"type": "preference", "prompt": None}),
        (rows_of(3, prompt="p", completion="a", label=(True, False)), {"loss": {"type": "kto"}, "label": "label"}),
        (rows_of(3, anchor="a", positive="b", negative="c"), {"texts": ["anchor", "positive", "negative"]}),
        ([SQUAD], {"type": "question_answering", "answers": "answers"}),
        ([SQUAD, UNANSWERED], {"type": "question_answering", "unanswerable": True}),
        (rows_of(3, tokens=["a", "b"], ner_tags=["O", "B-X"]), {"words": "tokens", "tags": "ner_tags"}),
        (rows_of(3, text="t", spans=[{"start": 0, "end": 1, "label": "A"}]), {"text": "text", "spans": "spans"}),
        (rows_of(3, question="q", choices=["a", "b"], answer=(0, 1)), {"type": "multiple_choice", "label": "answer"}),
        (rows_of(3, article="a" * 99, highlights="b" * 50), {"type": "seq2seq_lm", "target": "highlights"}),
        (rows_of(3, pixels=[[0, 1], [2, 3]], label=(0, 1)), {"type": "image_classification", "image": "pixels"}),
        (rows_of(3, file=("a/1.PNG", "2.jpg"), label=("a", "b")), {"type": "image_classification", "image": "file"}),
        (rows_of(3, text=("a.png", "b"), label=("a", "b")), {"type": CLASSES, "text": "text"}),
        (rows_of(3, text="t", url=("http://a/1.png",), label=("a", "b")), {"type": CLASSES, "text": "text"}),
    ],
    ids=lambda value: None if isinstance(value, list) else "-".join(map(str, value.values()))[:40],
)  # fmt: skip
def test_the_first_proposal(rows: list[dict[str, Any]], task: dict[str, Any]) -> None:
    found = shapes(columns_of(datasets.Dataset.from_list(rows), 10_000))
    assert found[0].task.items() >= task.items()


def test_numbers_alone_have_no_task() -> None:
    assert shapes(columns_of(datasets.Dataset.from_list(rows_of(3, a=(1, 2), b=(0.5, 1.5))), 10)) == []


def test_integers_may_be_classes_or_numbers() -> None:
    found = shapes(columns_of(datasets.Dataset.from_list(rows_of(30, text="t", stars=(1, 2))), 10_000))
    assert [shape.type for shape in found][:2] == [CLASSES, "sequence_regression"]
