from __future__ import annotations

from itertools import chain
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import RobertaTokenizerFast

from trainer.base.errors import DataError
from trainer.data.collate import Padding
from trainer.data.sources import Split
from trainer.data.tokenised_split import encode_split
from trainer.features.multiple_choice.section import MultipleChoice
from trainer.tasks.registry import build_task

WHERE = "`rows.jsonl`"
ENDINGS = ("ending0", "ending1", "ending2")
SWAG = {"context": "sent1", "question": "sent2", "choices": list(ENDINGS)}


def task_of(**keys):
    return build_task(MultipleChoice(type="multiple_choice", **keys))


def encode(task, rows, tokenizer, max_length=64, first_row=0):
    rows = datasets.Dataset.from_list(rows)
    task = task.resolve(rows, WHERE)
    rows = rows.select_columns(list(task.columns))
    return task.for_split(rows, first_row).encode(rows, tokenizer, max_length, WHERE, first_row)


def row(choices=("a file", "a folder"), label=1, **columns):
    return {"context": "Open the path.", "choices": list(choices), "label": label, **columns}


def swag_rows():
    texts = ["open the file", "read all lines of the text that the file holds", "close it", "return", "it is a list"]
    return [
        {"sent1": texts[i % 5] * (1 + i % 3), "sent2": texts[-1 - i % 4], "label": i % 3}
        | {ending: f"{texts[(i + place) % 5]} {place}" for place, ending in enumerate(ENDINGS)}
        for i in range(7)
    ]


@pytest.fixture(scope="module")
def roberta():
    """A small tokenizer as RoBERTa's: bytes, two tokens between the texts, no token types."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(["open the file"], 300, special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    return RobertaTokenizerFast(tokenizer_object=bpe._tokenizer)


@pytest.mark.parametrize("name", ["tokenizer", "roberta"])
def test_texts_equal_the_example_of_transformers(request, name):
    """`run_swag.py` repeats the first sentence for each ending; here only it is truncated."""
    tokenizer, rows = request.getfixturevalue(name), swag_rows()
    first = [[row["sent1"]] * 3 for row in rows]
    second = [[f"{row['sent2']} {row[ending]}" for ending in ENDINGS] for row in rows]
    pairs = list(chain(*first)), list(chain(*second))
    whole = tokenizer(*pairs)["input_ids"]
    max_length = max(map(len, whole)) - 3
    expected = tokenizer(*pairs, truncation="only_first", max_length=max_length, return_attention_mask=False)
    found = encode(task_of(**SWAG), rows, tokenizer, max_length)
    assert found.keys() == {*expected, "num_choices", "cut", "labels"}
    for column, values in expected.items():
        assert found[column] == [values[start : start + 3] for start in range(0, len(values), 3)]
    typed = [{**row, "sent1": f" {tokenizer.cls_token}{row['sent1']}{tokenizer.sep_token}\n"} for row in rows]
    assert encode(task_of(**SWAG), typed, tokenizer, max_length)["input_ids"] == found["input_ids"]
    assert found["cut"] == [any(len(ids) > max_length for ids in whole[i : i + 3]) for i in range(0, len(whole), 3)]
    assert 0 < sum(found["cut"]) < len(rows)
    assert found["labels"] == [row["label"] for row in rows]


def test_rows_with_fewer_choices_have_texts_of_one_token(tokenizer, tmp_path: Path):
    """More than the rows that are encoded at once, and the row with the most choices among the last."""
    rows = [row(label=index % 2) for index in range(1100)]
    rows[1050] = row(("to", "from", "a file", "none", "all"), 4)
    split = encode_split(Split(datasets.Dataset.from_list(rows), WHERE), task_of(), tokenizer, 64, tmp_path)
    assert (len(split), split.texts_per_row) == (1100, 5)
    inputs = Padding.of(tokenizer).inputs(split, np.array([0, 1050]))
    lengths = inputs["attention_mask"].sum(-1)
    assert lengths[0, 2:].tolist() == [1, 1, 1]
    assert lengths[0, :2].min() > 5
    assert lengths[1].min() > 5
    assert split.scalars["num_choices"][[0, 1050]].tolist() == [2, 5]


def test_absent_choices_have_no_probability(tokenizer):
    task = task_of(metrics=["accuracy"])
    logits, labels = torch.tensor([[-3.0, -2.0, 9.0], [1.0, 2.0, 0.0]], dtype=torch.bfloat16), torch.tensor([1, 0])

    class Output:
        pass

    Output.logits = logits
    scores = task.scores(Output, {"num_choices": torch.tensor([2, 3])})
    expected = [torch.log_softmax(torch.tensor(values), 0) for values in ([-3.0, -2.0], [1.0, 2.0, 0.0])]
    assert task.loss_sum(scores, labels).item() == pytest.approx(-float(expected[0][1] + expected[1][0]), rel=1e-6)
    predictions = task.predictions(scores, labels)
    assert predictions["predictions"].tolist() == [1, 1]
    assert task.metrics(predictions) == {"accuracy": 0.5}
    assert task.answers(scores, {})["probabilities"][0, 2] == 0


@pytest.mark.parametrize(
    ("label_format", "label", "choices", "index"),
    [
        (None, 1, "ab", 1),
        (None, "1", "xy", 1),
        (None, "B", "xy", 1),
        (None, " b ", "xy", 1),
        (None, "y", "xy", 1),
        (None, "A", "ABC", 0),  # letter and text agree
        (None, 2, "123", 2),  # an integer is an index
        ("index", "2", "123", 2),
        ("number", "2", "123", 1),
        ("number", 2, "xy", 1),
        ("letter", "B", "CBA", 1),
        ("text", "B", "BAC", 0),
        ("text", 3, "34", 0),
    ],
)
def test_labels(tokenizer, label_format, label, choices, index):
    task = task_of(label_format=label_format)
    assert encode(task, [row(choices, label)], tokenizer)["labels"] == [index]


def named(texts, names):
    return {"text": list(texts), "label": list(names)}


@pytest.mark.parametrize(
    ("label_format", "label", "names", "index"),
    [(None, "B", "ABC", 1), (None, "2", "123", 1), (None, "A", "CBA", 2), ("index", "1", "321", 1)],
)
def test_choices_with_labels_of_their_own(tokenizer, label_format, label, names, index):
    """The form of CommonsenseQA and ARC; a label is one of those of its row."""
    rows = [row(label=label) | {"choices": named(["no", "yes", "1"], names)}]
    found = encode(task_of(label_format=label_format), rows, tokenizer)
    assert (found["labels"], found["num_choices"]) == ([index], [3])
    assert found["input_ids"] == encode(task_of(), [row(["no", "yes", "1"])], tokenizer)["input_ids"]


@pytest.mark.parametrize(
    ("label", "problem"), [("1", "must name .* labels A, B, .* is '1'; correct the row$"), (None, "is null")]
)
def test_a_label_that_no_choice_has(tokenizer, label, problem):
    rows = [row(label=label) | {"choices": named("xy", "AB")} for label in ("A", label)]
    with pytest.raises(DataError, match=f"column `label`, row 2 of .* {problem}"):
        encode(task_of(), rows, tokenizer)


@pytest.mark.parametrize(
    ("label_format", "label", "choices", "problem"),
    [
        (None, None, "xy", "is null; every row needs a label"),
        (None, 2, "xy", 'must name .* by an index from 0 to 1, .* is 2; .* `task.label_format` to "number" if labels'),
        (None, -1, "xy", "must name one of the 2 choices, .* but is -1; correct the row$"),
        (None, "z", "xy", "must name one of the 2 choices, by an index .*, a letter, or the text .* but is 'z'"),
        (None, "2", "123", "is '2', .* choice 3 as index, choice 2 as text; set `task.label_format`"),
        (None, "A", "BA", "is 'A', .* choice 1 as letter, choice 2 as text; set `task.label_format`"),
        ("number", 0, "xy", "must name .* by a number from 1 to 2, but is 0"),
        ("letter", "C", "xy", "must name .* by a letter from A to B, but is 'C'"),
        ("text", "X", "xy", "must name .* by the text of one of them, but is 'X'"),
        ("text", "x", "xx", "is .* choice 1 as text, choice 2 as text; .* use an index"),
    ],
)  # fmt: skip
def test_unclear_labels_name_the_row(tokenizer, label_format, label, choices, problem):
    valid = 1 if not isinstance(label, str) else "p" if label_format == "text" else "B"
    with pytest.raises(DataError, match=rf"column `label`, row 9 of `rows.jsonl` {problem}"):
        encode(task_of(label_format=label_format), [row("pq", valid), row(choices, label)], tokenizer, first_row=7)


@pytest.mark.parametrize(
    ("changed", "keys", "problem"),
    [
        ({"choices": ["one"]}, {}, "`choices`, row 2 of .* must have at least two choices, but has 1"),
        ({"choices": []}, {}, "`choices`, row 2 of .* must have at least two choices, but has 0"),
        ({"choices": None}, {}, "`choices`, row 2 of .* must have at least two choices, but has 0"),
        ({"choices": ["one", None]}, {}, "choice 2 of column `choices`, row 2 of .* is null; every choice"),
        ({"choices": ["one", " "]}, {}, "choice 2 of column `choices`, row 2 of .* is empty; every choice"),
        ({"two": ""}, {"choices": ["one", "two"]}, "column `two`, row 2 of .* is empty; every choice"),
        ({"context": None}, {}, "`context`, row 2 of .* is null"),
        ({"one": None}, {"question": "one"}, "`one`, row 2 of .* is null"),
        ({}, {"question": "one", "question_texts": {"x": "y"}}, "`one`, row 1 of .* is '1', .* has texts for x only"),
        ({"choices": ["one", "a " * 60]}, {}, "choice 2 of .*, row 2 of .* has 60 tokens, .* `data.max_length` 62,"),
        (
            {"two": "a " * 59}, {"question": "one", "choices": ["context", "two"], "context": "context2"},
            "column `two`, row 2 of .* has 60 tokens with its question",
        ),
    ],
)  # fmt: skip
def test_rows_that_do_not_fit(tokenizer, changed, keys, problem):
    columns = {"one": "1", "two": "2", "context2": "more"}
    with pytest.raises(DataError, match=problem):
        encode(task_of(**keys), [row(**columns), {**row(**columns), **changed}], tokenizer, max_length=62)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"context": "no"}, "`task.context` names the column `no`, but .* has none of that name"),
        ({"choices": "no"}, "`task.choices` names the column `no`"),
        ({"choices": "context"}, "must name a column of lists of strings or .* column `context` of .* holds string"),
        ({"choices": ["context", "label"]}, "`task.choices` must name a column of strings, .* `label` .* holds int64"),
        ({"label": "choices"}, "`task.label` must name a column of integers or strings, but column `choices`"),
        ({"label": "share"}, "`task.label` must name a column of integers or strings, .* holds double|float64"),
    ],
)  # fmt: skip
def test_columns_that_do_not_fit(tokenizer, keys, problem):
    with pytest.raises(DataError, match=problem):
        encode(task_of(**keys), [row(share=0.5)], tokenizer)


@pytest.mark.parametrize(
    ("keys", "question", "second"),
    [
        ({}, "So", "So yes"),
        ({}, "", "yes"),
        ({"blank": "_"}, "Say _ or _", "Say yes or yes"),
        ({"blank": "_"}, "Well", "Well yes"),
        ({"question_texts": {"cause": "Why?"}}, "cause", "Why? yes"),
    ],
)
def test_question_and_choice_are_one_text(tokenizer, keys, question, second):
    found = encode(task_of(question="question", **keys), [row(("yes", "no"), question=question)], tokenizer)
    assert found["input_ids"][0][0] == tokenizer("Open the path.", second)["input_ids"]


def test_rows_to_predict_need_no_labels(tokenizer):
    task = task_of().without_labels()
    assert task.columns == ("context", "choices")
    found = encode(task, [row(label=None)], tokenizer)
    assert "labels" not in found
    assert found["num_choices"] == [2]
