from __future__ import annotations

import datasets
import numpy as np
import pytest
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoConfig, AutoModelForQuestionAnswering, RobertaTokenizerFast

from tests.helpers.training import TINY_BERT, VOCABULARY
from trainer.base.errors import DataError, UsageError
from trainer.data.cache import EntryWriter, open_entry
from trainer.features.question_answering.section import QuestionAnswering
from trainer.tasks.registry import build_task
from trainer.tasks.types import EvaluatedSplit

WHERE = "`rows.jsonl`"
CONTEXT = "Return a list of the files. Raise an OSError if the folder is missing. Links are not followed, see lists."


def task_of(**keys):
    return build_task(QuestionAnswering(type="question_answering", **keys))


def row(question="What does it raise?", answer="OSError", context=CONTEXT):
    starts = [context.index(answer)] if answer else []
    return {
        "question": question,
        "context": context,
        "answers": {"text": [answer][: len(starts)], "answer_start": starts},
    }


def rows_of(*rows):
    return datasets.Dataset.from_list(list(rows))


def encode(task, rows, tokenizer, max_length=128, first_row=0):
    task = task.resolve(rows, WHERE)
    return task.encode(rows.select_columns(list(task.columns)), tokenizer, max_length, WHERE, first_row)


@pytest.fixture(scope="module")
def roberta():
    """A small tokenizer as RoBERTa's: bytes, two tokens between question and context, no token types."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator([CONTEXT], 300, special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    return RobertaTokenizerFast(tokenizer_object=bpe._tokenizer)


def labels_of_transformers(windows, rows):
    """The labels of the example script `run_qa.py` of transformers: it walks over the offsets of each window."""
    for number, sample in enumerate(windows["overflow_to_sample_mapping"]):
        offsets, sequences = windows["offset_mapping"][number], windows.sequence_ids(number)
        first, last = sequences.index(1), len(sequences) - 1 - sequences[::-1].index(1)
        answers = rows[sample]["answers"]
        start = answers["answer_start"][0] if answers["text"] else -1
        end = start + len(answers["text"][0]) if answers["text"] else -1
        if not answers["text"] or offsets[first][0] > start or offsets[last][1] < end:
            yield [0, 0]
            continue
        while first <= last and offsets[first][0] <= start:
            first += 1
        while offsets[last][1] >= end:
            last -= 1
        yield [first - 1, last + 1]


@pytest.mark.parametrize("name", ["tokenizer", "roberta"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_windows_and_labels_equal_transformers(request, name, side):
    tokenizer = request.getfixturevalue(name)
    rows = rows_of(
        row(), row("  What is missing?", "the folder"), row("Why?", ""), row("What?", "lists", "It lists lists.")
    )
    typed = rows.map(  # with the special tokens, as texts that were tokenised once before
        lambda one: {
            "question": f" {tokenizer.cls_token}{one['question']}{tokenizer.sep_token} ",
            "context": f"{one['context']}{tokenizer.sep_token}\n",
        }
    )
    found = {}
    for shorter, stride in ((0, 7), (2, 0), (-7, 12)):
        max_length = (24 if name == "tokenizer" else 40) - shorter
        expected = tokenizer(
            [question.lstrip() for question in rows["question"]],
            rows["context"][:],
            truncation="only_second",
            max_length=max_length,
            stride=stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        tokenizer.truncation_side = tokenizer.padding_side = side
        try:
            found, again = (
                encode(task_of(stride=stride, unanswerable=True), some, tokenizer, max_length) for some in (rows, typed)
            )
        finally:
            tokenizer.truncation_side = tokenizer.padding_side = "right"
        assert found["input_ids"] == again["input_ids"] == expected["input_ids"]
        assert ("token_type_ids" in found) == (name == "tokenizer")
        assert found.get("token_type_ids") == expected.get("token_type_ids")
        assert [label.tolist() for label in found["labels"]] == list(labels_of_transformers(expected, rows))
        assert [window[0] for window in found["window"]] == expected["overflow_to_sample_mapping"]
        assert len(found["window"]) > len(rows)


def test_an_answer_longer_than_every_window_is_counted(tokenizer, tmp_path):
    rows = rows_of(row(), row(answer=CONTEXT), row("Why?", ""))
    found = encode(task_of(unanswerable=True, stride=0), rows, tokenizer, 16)
    assert found["cut_target"] == [False, True, False]
    own = [label.tolist() for label, window in zip(found["labels"], found["window"], strict=True) if window[0] == 1]
    assert len(own) > 1
    assert all(label == [0, 0] for label in own)


def test_the_answer_may_be_in_two_columns(tokenizer):
    flat = rows_of(
        {"question": "What?", "context": "a b", "text": "b", "start": 2.0},
        {"question": "Why?", "context": "a b", "text": None, "start": None},
    )
    found = encode(task_of(answers=["text", "start"], unanswerable=True), flat, tokenizer)
    assert [label.tolist() for label in found["labels"]] == [[5, 5], [0, 0]]


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"question": None}, r"column `question`, row 8 of `rows.jsonl` is null; every row needs a question"),
        ({"question": " "}, r"column `question`, row 8 .* is empty"),
        ({"context": None}, r"column `context`, row 8 .* is null"),
        ({"context": ""}, r"column `context`, row 8 .* is empty"),
        ({"answers": {"text": [], "answer_start": []}}, r"row 8 .* has no answer; .* set `task.unanswerable` to true"),
        ({"answers": None}, r"row 8 .* has no answer; .* set `task.unanswerable` to true"),
        (
            {"answers": {"text": ["list"], "answer_start": [10]}},
            r"row 8 .* has the answer 'list' at character 10, which does not match: the context has 'ist ' there; the"
            r" context has it at 9",
        ),
        (
            {"answers": {"text": ["no"], "answer_start": [len(CONTEXT) - 1]}},
            rf"which is outside of the context, which has {len(CONTEXT)} characters; the context has it at 81",
        ),
        ({"answers": {"text": ["list"], "answer_start": [-96]}}, r"at character -96, which is outside"),
        ({"answers": {"text": ["zebra"], "answer_start": [9]}}, r"the context does not have it at all"),
        ({"answers": {"text": ["list", "a"], "answer_start": [9]}}, r"has 2 texts but 1 starts"),
        ({"answers": {"text": [" "], "answer_start": [6]}}, r"must be a text that is not empty"),
        ({"answers": {"text": ["a"], "answer_start": [None]}}, r"has the start None; it must be the number"),
        (
            {"question": "Why is it so? " * 40},
            r"row 8 .* leaves room for 0 tokens .* \(`task.stride`\); shorten the question",
        ),
    ],
)
def test_a_wrong_row_is_named(tokenizer, changed, problem):
    rows = rows_of(row(), {**row(), **changed})
    with pytest.raises(DataError, match=problem):
        encode(task_of(), rows, tokenizer, 64, first_row=6)


def test_wrong_columns_are_named(tokenizer):
    with pytest.raises(DataError, match=r"`task.context` names the column `context`, .* columns are `question`"):
        task_of().resolve(rows_of({"question": "a"}), WHERE)
    with pytest.raises(DataError, match=r"`task.answers` must name a column of the form .* `answers` .* holds string"):
        task_of().resolve(rows_of({**row(), "answers": "a"}), WHERE)
    slow = type("Slow", (), {"is_fast": False, "name_or_path": "slow"})()
    with pytest.raises(UsageError, match=r"needs a fast tokenizer, .* `slow` is a slow one \(Slow\); name a model"):
        encode(task_of(), rows_of(row()), slow)


def test_the_loss_is_that_of_transformers_without_padding():
    torch.manual_seed(0)
    config = AutoConfig.for_model(**TINY_BERT, initializer_range=0.5)
    model = AutoModelForQuestionAnswering.from_config(config).eval()
    ids, lengths = torch.randint(5, VOCABULARY, (4, 12)), torch.tensor([12, 5, 9, 7])
    mask = (torch.arange(12) < lengths[:, None]).long()
    labels = torch.tensor([[3, 11], [0, 0], [2, 2], [1, 6]])
    task, inputs = task_of(), {"input_ids": ids, "attention_mask": mask}
    scores = task.scores(model(**inputs), inputs)
    loss = task.loss_sum(scores, labels)
    expected = sum(
        model(row[None, :length], start_positions=label[:1], end_positions=label[1:]).loss
        for row, length, label in zip(ids, lengths, labels, strict=True)
    )
    torch.testing.assert_close(loss, expected)
    assert task.num_valid(labels) == 4
    weights = list(model.parameters())
    for one, other in zip(*(torch.autograd.grad(total, weights) for total in (loss, expected)), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def best_by_trying_all(model, tokenizer, row, max_length, stride, longest):
    """All spans, best first, and the score for no answer, by trying all pairs of tokens of each window."""
    windows = tokenizer(
        row["question"], row["context"], truncation="only_second", max_length=max_length, stride=stride,
        return_overflowing_tokens=True, return_offsets_mapping=True,
    )  # fmt: skip
    spans, none = {}, []
    for number, ids in enumerate(windows["input_ids"]):
        with torch.no_grad():
            output = model(torch.tensor([ids]), token_type_ids=torch.tensor([windows["token_type_ids"][number]]))
        start, end = output.start_logits[0].double(), output.end_logits[0].double()
        none.append(float(start[0] + end[0]))
        places = [place for place, sequence in enumerate(windows.sequence_ids(number)) if sequence == 1]
        offsets = windows["offset_mapping"][number]
        for first in places:
            for last in places:
                if first <= last < first + longest:
                    span = (offsets[first][0], offsets[last][1])
                    spans[span] = max(spans.get(span, -1e9), float(start[first] + end[last]))
    return sorted(spans.items(), key=lambda item: -item[1]), min(none)


@pytest.mark.parametrize("unanswerable", [False, True])
def test_answers_are_the_best_of_all_windows(tokenizer, tmp_path, unanswerable):
    """Whatever the order of batches; the metrics are those of the same answers."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**TINY_BERT, "vocab_size": 3000}, initializer_range=0.4)
    model = AutoModelForQuestionAnswering.from_config(config).eval()
    rows = rows_of(row(), row("What is missing?", "the folder"), row("Why?", "Links" if not unanswerable else ""))
    task = task_of(
        stride=7, unanswerable=unanswerable, n_best=32, max_answer_length=5, null_threshold=1.0 * unanswerable,
        metrics=["exact_match", "f1"],
    )  # fmt: skip
    with EntryWriter(tmp_path / "entry") as writer:
        writer.add(encode(task, rows, tokenizer, 32))
    encoded = open_entry(tmp_path / "entry")
    assert len(encoded) > len(rows)
    found = []
    for number in range(len(encoded)):
        ids, types = (
            torch.tensor(encoded.tokens[name][encoded.offsets[number] : encoded.offsets[number + 1]].astype(int))
            for name in ("input_ids", "token_type_ids")
        )
        inputs = {"input_ids": ids[None], "token_type_ids": types[None], "attention_mask": torch.ones_like(ids[None])}
        with torch.no_grad():
            found.append(task.answers(task.scores(model(**inputs), inputs), inputs))
    width = max(part["starts"].shape[1] for part in found)
    answers = {
        name: torch.cat(
            [torch.nn.functional.pad(part[name], (0, width - part[name].shape[-1]), value=-100) for part in found]
        )
        if name != "no_answer"
        else torch.cat([part[name] for part in found])
        for name in found[0]
    }
    split = EvaluatedSplit(rows, encoded, tokenizer, WHERE)
    shown = task.without_labels().readable(answers, split)
    texts = []
    for one, record in zip(rows, shown, strict=True):
        expected, none = best_by_trying_all(model, tokenizer, one, 32, 7, longest=5)
        (start, end), score = expected[0]
        odds = np.exp([value for _, value in expected[:32]] + [none] * unanswerable)
        odds /= odds.sum()
        assert [(best["start"], best["end"]) for best in record["n_best"][:5]] == [span for span, _ in expected[:5]]
        assert record["n_best"][0]["score"] == pytest.approx(odds[0], rel=1e-4)
        texts.append("" if unanswerable and none - score > 1.0 else one["context"][start:end])
        assert record["answer"] == texts[-1]
        assert (record["start"], record["end"]) == ((start, end) if texts[-1] else (None, None))
        if unanswerable:
            assert record["no_answer_probability"] == pytest.approx(odds[-1], rel=1e-4)
    metrics = task.split_metrics(answers, split)
    golds = [one["answers"]["text"] or [""] for one in rows]
    pictured = task.picture(answers, split)["texts"]
    assert [(one["question"], one["answer found"]) for one in pictured] == [
        (one["question"], text) for one, text in list(zip(rows, texts, strict=True))[:5]
    ]
    assert [one["answers accepted"] for one in pictured] == [" | ".join(found) for found in golds[:5]]
    right = [text.lower().strip(". ") == gold[0].lower() for text, gold in zip(texts, golds, strict=True)]
    assert metrics["exact_match"] == pytest.approx(100 * np.mean(right))
    assert set(metrics) == {"exact_match", "f1"}


@pytest.mark.parametrize("width", [5, 40, 300])
def test_the_first_of_equal_scores_are_kept(width):
    """A batch of longer rows has wider padding, which must not choose other positions."""
    logits = torch.full((2, width, 2), -1e4)
    logits[:, :5] = torch.tensor([[1.0, 0.0], [2.0, 2.0], [1.0, 2.0], [2.0, 2.0], [1.0, 2.0]])
    found = task_of(n_best=3).answers(logits, {})
    assert found["starts"].tolist() == [[1, 3, 0]] * 2
    assert found["ends"].tolist() == [[1, 2, 3]] * 2


def test_rows_to_predict_need_no_answers(tokenizer):
    task = task_of().resolve(rows_of(row()), WHERE).without_labels()
    rows = rows_of({"question": "What?", "context": CONTEXT})
    task.check_columns(rows.features, WHERE)
    found = task.encode(rows, tokenizer, 128, WHERE, 0)
    assert "labels" not in found
    assert task.fingerprint != task_of().fingerprint
