"""Token classification: windows, alignment, metrics, answers and the errors of rows."""

from __future__ import annotations

from typing import Any

import datasets
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from trainer.base.errors import DataError, UsageError
from trainer.data.sources import Split
from trainer.data.tokenised_split import encode_split
from trainer.features.token_classification.section import TokenClassification
from trainer.tasks.registry import build_task
from trainer.tasks.types import EvaluatedSplit

WHERE = "`rows.jsonl`"
TAGS = ["O", "B-X", "I-X", "B-Y", "I-Y"]


def task_of(**keys):
    columns = {} if "text" in keys else {"words": "words", "tags": "tags"}
    return build_task(TokenClassification(type="token_classification", **{**columns, **keys}))


def words_of(*rows: tuple[str, str], declared: list[str] | None = None):
    """Return rows of words and tags, each separated by spaces."""
    columns = {"words": [words.split() for words, _ in rows], "tags": [tags.split() for _, tags in rows]}
    kind = datasets.ClassLabel(names=declared) if declared else datasets.Value("string")
    features = {"words": datasets.List(datasets.Value("string")), "tags": datasets.List(kind)}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


def spans_of(*rows: tuple[str, list[tuple[int, int, str]]]):
    spans = [[{"start": s, "end": e, "label": label} for s, e, label in spans] for _, spans in rows]
    kind = {"start": datasets.Value("int64"), "end": datasets.Value("int64"), "label": datasets.Value("string")}
    features = {"text": datasets.Value("string"), "spans": datasets.List(kind)}
    return datasets.Dataset.from_dict(
        {"text": [text for text, _ in rows], "spans": spans}, features=datasets.Features(features)
    )


def resolved(rows, **keys):
    return task_of(**keys).resolve(rows, WHERE)


def encoded(task, rows, tokenizer, folder, max_length=16):
    """Return the evaluated split, through the cache, as in a run."""
    return EvaluatedSplit(rows, encode_split(Split(rows, WHERE), task, tokenizer, max_length, folder), tokenizer, WHERE)


def perfect(split: EvaluatedSplit) -> dict[str, torch.Tensor]:
    """Return predictions that are the labels, and class 0 for other tokens."""
    ends, labels = split.encoded.offsets[1:-1], np.maximum(split.encoded.tokens["labels"], 0)
    rows = [torch.from_numpy(row.astype(np.int32)) for row in np.split(labels, ends)]
    return {"predictions": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)}


def test_the_first_token_of_a_word_has_its_label(tokenizer):
    rows = words_of(("the asyncio sockets", "O B-X I-X"), ("", ""))
    task = resolved(rows, labels=TAGS)
    found = task.encode(rows, tokenizer, 16, WHERE, 5)
    reference = tokenizer(rows["words"][0], is_split_into_words=True)
    assert found["input_ids"] == [reference["input_ids"]], "an empty row has no window"
    words = reference.word_ids()
    first = [word is not None and word != words[place - 1] for place, word in enumerate(words)]
    assert found["labels"] == [[word if new else -100 for word, new in zip(words, first, strict=True)]]
    assert found["word_numbers"] == [[word + 1 if new else 0 for word, new in zip(words, first, strict=True)]]
    assert found["row_numbers"] == [5]
    every = resolved(rows, labels=TAGS, label_all=True).encode(rows, tokenizer, 16, WHERE, 0)["labels"]
    inside = [0, 2, 2]  # O, I-X, I-X
    assert every == [
        [-100 if word is None else word if new else inside[word] for word, new in zip(words, first, strict=True)]
    ]


@pytest.mark.parametrize("stride", [0, 1, 2, 3])
def test_windows_label_each_word_once_where_it_has_most_context(tokenizer, stride):
    rows = words_of((" ".join("abcdefghijklmnopq"), " ".join(["O"] * 17)))
    found = resolved(rows, stride=stride, labels=TAGS).encode(rows, tokenizer, 6, WHERE, 0)
    assert all(len(ids) <= 6 and ids[0] == 2 and ids[-1] == 3 for ids in found["input_ids"])
    step = 4 - stride
    numbers = [[number for number in window if number] for window in found["word_numbers"]]
    assert sorted(number for own in numbers for number in own) == list(range(1, 18))
    for window, own in enumerate(numbers):
        for number in own:
            contexts = {}
            for start in range(0, 17 - stride, step):
                left, right = number - 1 - start, min(start + 4, 17) - number
                if left >= 0 and right >= 0:
                    contexts[start // step] = min(left if start else 99, right if start + 4 < 17 else 99)
            assert contexts[window] == max(contexts.values())


class TestMetrics:
    @pytest.mark.parametrize("max_length", [5, 64])
    def test_a_long_row_is_scored_as_a_whole(self, tokenizer, tmp_path, max_length):
        """Entities cross windows of three tokens; wrong classes are set by hand."""
        rows = words_of(
            ("a b c d e f g h", "O B-X I-X I-X O B-Y O O"), ("", ""), ("i", "B-X"), ("\u200b j k", "B-Y O B-X")
        )
        task = resolved(rows, metrics=["f1", "precision", "recall", "f1_macro", "accuracy"])
        split = encoded(task, rows, tokenizer, tmp_path, max_length)
        predictions = perfect(split)
        # All are right but the word without a token, which counts as O: X is 3 of 3, Y is 1 of 2.
        assert task.split_metrics(predictions, split) == pytest.approx(
            {"f1": 8 / 9, "precision": 1.0, "recall": 0.8, "f1_macro": (1 + 2 / 3) / 2, "accuracy": 11 / 12}
            | {"f1/X": 1.0, "f1/Y": 2 / 3}
        )
        is_inside = predictions["predictions"] == task.class_names.index("I-X")
        predictions["predictions"][is_inside.nonzero()[-1][0], is_inside.nonzero()[-1][1]] = task.class_names.index("O")
        # The entity of three words is now of two: X is 2 of 3.
        assert task.split_metrics(predictions, split)["f1/X"] == pytest.approx(2 / 3)
        first, *_, last = task.picture(predictions, split)["texts"]
        assert first["text"] == "a b c d e f g h"
        assert (first["entities found"], first["entities labelled"]) == ("b c (X), f (Y)", "b c d (X), f (Y)")
        assert (last["entities found"], last["entities labelled"]) == ("k (X)", "\u200b (Y), k (X)")

    def test_plain_tags_have_no_entities(self, tokenizer, tmp_path):
        rows = words_of(("a b", "DET NOUN"), ("c d", "NOUN VERB"))
        with pytest.raises(UsageError, match=r"name f1 only for tags of entities.*DET, NOUN, VERB; use accuracy"):
            resolved(rows)
        task = resolved(rows, metrics=["accuracy", "f1_macro"])
        split = encoded(task, rows, tokenizer, tmp_path)
        predictions = perfect(split)
        predictions["predictions"][0, 1] = 1  # DET as NOUN
        metrics = task.split_metrics(predictions, split)
        assert task.picture(predictions, split) is None
        assert metrics == pytest.approx({"accuracy": 0.75, "f1_macro": (0 + 0.8 + 1) / 3})

    def test_the_loss_is_the_sum_over_labels(self, tokenizer):
        task = resolved(words_of(("a", "B-X"), ("b", "O")))
        logits, labels = torch.randn(2, 3, 2), torch.tensor([[-100, 1, 0], [-100, 1, -100]])
        expected = F.cross_entropy(logits[[0, 0, 1], [1, 2, 1]], torch.tensor([1, 0, 1]), reduction="sum")
        assert task.loss_sum(logits, labels) == pytest.approx(float(expected))
        assert int(task.num_valid(labels)) == 3
        assert float(task.loss_sum(logits, torch.full((2, 3), -100))) == 0.0


class TestAnswers:
    def answers(self, task, split, logits_of):
        inputs: dict[str, Any] = {}
        found = task.answers(logits_of(split), inputs)
        return task.readable(found, split)

    def test_entities_of_a_text_have_characters(self, tokenizer, tmp_path):
        text = "Open the asyncio.sockets, in  Berlin!"
        rows = spans_of((text, [(9, 24, "MODULE"), (30, 36, "PLACE")]), ("", []), ("\u200b", []))
        task = resolved(rows, text="text", spans="spans")
        labelled = encoded(task, rows, tokenizer, tmp_path, 6)
        assert task.split_metrics(perfect(labelled), labelled)["f1"] == 1.0
        plain = task.without_labels()
        split = encoded(plain, rows.remove_columns("spans"), tokenizer, tmp_path, 6)
        assert "labels" not in split.encoded.tokens

        def logits(split):
            return 9.0 * F.one_hot(perfect(labelled)["predictions"].clamp(min=0).long(), 5)

        found = self.answers(plain, split, logits)
        score = pytest.approx(float(F.softmax(torch.tensor([9.0, 0, 0, 0, 0]), -1)[0]))
        assert found == [
            {
                "entities": [
                    {
                        "label": "MODULE",
                        "text": "asyncio.sockets",
                        "start": 9,
                        "end": 24,
                        "score": pytest.approx(score),
                    },
                    {"label": "PLACE", "text": "Berlin", "start": 30, "end": 36, "score": score},
                ]
            },
            {"entities": []},
            {"entities": []},
        ]

    def test_entities_of_words_have_word_numbers_and_plain_tags_are_listed(self, tokenizer, tmp_path):
        rows = words_of(("in New York now", "O B-X I-X O"), ("x", "B-X"))
        task = resolved(rows)
        split = encoded(task, rows, tokenizer, tmp_path)
        answers = {**perfect(split), "scores": torch.full(perfect(split)["predictions"].shape, 0.5)}
        assert task.readable(answers, split) == [
            {"entities": [{"label": "X", "text": "New York", "start": 1, "end": 3, "score": 0.5}]},
            {"entities": [{"label": "X", "text": "x", "start": 0, "end": 1, "score": 0.5}]},
        ]
        rows = words_of(("a \u200b b", "DET VERB NOUN"))
        task = resolved(rows, metrics=["accuracy"])
        split = encoded(task, rows, tokenizer, tmp_path)
        answers = {**perfect(split), "scores": torch.full(perfect(split)["predictions"].shape, 0.5)}
        assert task.readable(answers, split) == [{"tags": ["DET", None, "NOUN"], "scores": [0.5, 0.0, 0.5]}]


def test_a_word_longer_than_a_window_is_scored_once(tokenizer, tmp_path):
    rows = words_of(("a " + "xq" * 20 + " b", "O B-X O"), ("c", "O"))
    task = resolved(rows)
    split = encoded(task, rows, tokenizer, tmp_path, 8)
    windows = np.split(split.encoded.tokens["labels"], split.encoded.offsets[1:-1])
    assert any((labels == -100).all() for labels in windows), "a window without a label"
    assert sum(int((labels != -100).sum()) for labels in windows) == 4
    assert task.split_metrics(perfect(split), split)["f1"] == 1.0


def test_tokenizers_of_bytes_need_no_prefix_space(tmp_path):
    """RoBERTa and GPT-2 refuse lists of words; the words are joined, so tokens are those of the text."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    texts = ["New York is big, is it not? \U0001f600"]
    raw.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="!")
    rows = words_of(("New York is \U0001f600", "B-X I-X O B-Y"))
    found = resolved(rows).encode(rows, tokenizer, 64, WHERE, 0)
    assert found["input_ids"] == [tokenizer("New York is \U0001f600")["input_ids"]]
    assert [number for number in found["word_numbers"][0] if number] == [1, 2, 3, 4]
    spans = spans_of((texts[0], [(0, 8, "X"), (12, 15, "Y"), (28, 29, "Y")]))
    task = resolved(spans, text="text", spans="spans")
    split = encoded(task, spans, tokenizer, tmp_path)
    assert task.split_metrics(perfect(split), split)["f1"] == 1.0
    (pictured,) = task.picture(perfect(split), split)["texts"]
    assert pictured["entities found"] == pictured["entities labelled"] == "New York (X), big (Y), \U0001f600 (Y)"


def test_the_head_of_a_checkpoint_sets_the_order():
    task = resolved(words_of(("a b", "B-X O"), ("c", "B-Y")))
    assert task.class_names == ("B-X", "B-Y", "O")
    ordered, notes = task.in_checkpoint_order(("O", "B-Y", "B-X"), chosen=False)
    assert ordered.class_names == ("O", "B-Y", "B-X")
    assert notes == ["classes are in the order of the checkpoint: O, B-Y, B-X"]
    assert task.in_checkpoint_order(("O", "B-PER", "I-PER", "B-LOC"), chosen=False) == (task, []), "only O is shared"
    with pytest.raises(UsageError, match="column `tags` must hold the classes of the checkpoint"):
        task.in_checkpoint_order(("O", "B-X", "I-X"), chosen=False)


def test_integers_and_declared_tags(tokenizer):
    rows = words_of(("a b", "B-X O"), declared=["O", "B-X"])
    task = resolved(rows)
    assert task.class_names == ("O", "B-X")
    numbers = datasets.Dataset.from_dict({"words": [["a", "b"]], "tags": [[1, 0]]})
    task = resolved(numbers, labels=["O", "B-X"])
    assert task.encode(numbers, tokenizer, 16, WHERE, 0)["labels"] == [[-100, 1, 0, -100]]
    with pytest.raises(DataError, match="must hold integers, as the training split does, but holds class names"):
        task.check_columns(words_of(("a", "O")).features, WHERE)


NULL_WORD = datasets.Dataset.from_dict({"words": [["a"], ["b", None]], "tags": [["O"], ["O", "B-X"]]})
NULL_TAG = datasets.Dataset.from_dict({"words": [["a"], ["b", "c"]], "tags": [["B-X"], ["O", None]]})
NO_SPANS = datasets.Dataset.from_dict({"text": ["a"], "spans": [None]}, features=spans_of(("a", [])).features)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            words_of(("a", "O"), ("b c", "O")),
            r"`tags`, row 2 of .rows.jsonl. must have one tag for each of the 2",
        ),
        (
            words_of(("a", "O"), ("b c", "O B-Z")),
            r"`tags`, row 2 of .rows.jsonl., word 2, is the label 'B-Z', which",
        ),
        (words_of(("a", "O"), ("[CLS] b", "O O")), r"`words`, row 2 .* begins or ends with a special token, which"),
        (NULL_WORD, r"`words`, row 2 of .rows.jsonl., word 2, is null"),
        (NULL_TAG, r"`tags`, row 2 of .rows.jsonl., word 2, is null"),
        (spans_of(("Berlin", [(0, 9, "X")])), r"`spans`, row 1 .* has the span 0-9 X, but the text has 6 characters"),
        (spans_of(("a [SEP] ", [])), r"`text`, row 1 .* begins or ends with a special token, which"),
        (spans_of(("Berlin", [(3, 3, "X")])), r"has the span 3-3 X"),
        (
            spans_of(("In Berlin", [(3, 6, "X")])),
            r"span 3-6 X, 'Ber', which does not start and end .*'Berlin'",
        ),
        (spans_of(("In Berlin", [(2, 9, "X")])), r"span 2-9 X, ' Berlin', which does not start"),
        (spans_of(("a b", [(0, 3, "X"), (2, 3, "Y")])), r"spans that overlap: 0-3 X and 2-3 Y; keep one"),
        (spans_of(("a b", [(0, 1, "Z")])), r"has the label 'Z', which is not among those .*: X, Y"),
        (NO_SPANS, r"`spans`, row 1 .* is null; a row without entities has an empty list"),
    ],
)
def test_rows_that_are_refused(tokenizer, rows, message):
    keys = {"text": "text", "spans": "spans"} if "spans" in rows.features else {}
    task = task_of(labels=TAGS, **keys).with_classes(tuple(TAGS), True)
    with pytest.raises(DataError, match=message):
        task.encode(rows, tokenizer, 16, WHERE, 0)


@pytest.mark.parametrize(
    ("columns", "keys", "message"),
    [
        ({"words": [["a"]]}, {}, "`task.tags` names the column `tags`, but `rows.jsonl` has none"),
        (
            {"words": ["a b"], "tags": [["O"]]},
            {},
            "JSON Lines and Parquet can hold them, but column `words` of `rows.jsonl` holds string",
        ),
        ({"words": [["a"]], "tags": [[0.5]]}, {}, "must name a column of lists of tags or of integers"),
        ({"text": ["a"], "spans": ["0-1"]}, {"text": "text", "spans": "spans"}, r"lists of \{start, end, label\}, but"),
        ({"text": ["a"], "spans": [[]]}, {"text": "text", "spans": "spans"}, "must hold spans, but all its lists are"),
    ],
)
def test_columns_that_are_refused(columns, keys, message):
    with pytest.raises(DataError, match=message):
        resolved(datasets.Dataset.from_dict(columns), **keys)


def test_a_split_without_tokens_and_a_large_overlap(tokenizer, tmp_path):
    rows = words_of(("", ""), ("\u200b", "O"))
    with pytest.raises(DataError, match="must hold a text with a token, but has none"):
        encoded(resolved(rows, labels=TAGS), rows, tokenizer, tmp_path)
    with pytest.raises(UsageError, match=r"the 2 special tokens and the 14 tokens that windows share, but is 16"):
        resolved(rows, labels=TAGS, stride=14).encode(rows, tokenizer, 16, WHERE, 0)


def test_a_slow_tokenizer_is_refused():
    class Slow:
        is_fast, name_or_path = False, "slow"

        def num_special_tokens_to_add(self) -> int:
            return 2

    rows = words_of(("a", "O"))
    with pytest.raises(UsageError, match="needs a fast tokenizer"):
        resolved(rows, labels=TAGS).encode(rows, Slow(), 16, WHERE, 0)
