from __future__ import annotations

import datasets
import numpy as np
import pytest
import sklearn.metrics
import sklearn.utils.class_weight
import torch

from trainer.base.errors import DataError, UsageError
from trainer.recipe.schema import SequenceClassification
from trainer.tasks.registry import build_task

WHERE = "`rows.jsonl`"


def task_of(**keys):
    return build_task(SequenceClassification(type="sequence_classification", **{"text": "text", **keys}))


def rows_of(labels, declared=None, **columns):
    rows = datasets.Dataset.from_dict({"text": [f"text {i}" for i in range(len(labels))], "label": labels, **columns})
    return rows.cast_column("label", datasets.ClassLabel(names=declared)) if declared else rows


def labels_of(task, rows, tokenizer, first_row=0):
    return task.encode(rows, tokenizer, 16, WHERE, first_row)["labels"]


def resolved(*names, **keys):
    return task_of(**keys).resolve(rows_of(list(names)), WHERE)


def test_names_are_found_and_sorted(tokenizer):
    task = resolved("b", "a", "b", None)
    assert task.model_options() == {
        "num_labels": 2,
        "id2label": {0: "a", 1: "b"},
        "label2id": {"a": 0, "b": 1},
        "problem_type": "single_label_classification",
    }
    assert labels_of(task, rows_of(["b", "a"]), tokenizer) == [1, 0]


def test_names_of_the_recipe_set_the_order(tokenizer):
    task = resolved("b", "a", labels=["b", "a", "rare"])
    assert task.model_options()["id2label"] == {0: "b", 1: "a", 2: "rare"}
    assert labels_of(task, rows_of(["rare", "b"]), tokenizer) == [2, 0]


def test_integers_are_classes(tokenizer):
    task = task_of().resolve(rows_of([2, 0, 1, 1]), WHERE)
    assert task.model_options()["id2label"] == {0: "0", 1: "1", 2: "2"}
    assert labels_of(task, rows_of([2, 0]), tokenizer) == [2, 0]


def test_integers_take_the_names_of_the_recipe(tokenizer):
    task = task_of(labels=["no", "yes", "maybe"]).resolve(rows_of([0, 1]), WHERE)
    assert task.model_options()["id2label"] == {0: "no", 1: "yes", 2: "maybe"}
    assert labels_of(task, rows_of([2]), tokenizer) == [2]


def test_declared_names_are_honoured(tokenizer):
    rows = rows_of([1, 0], declared=["not_equivalent", "equivalent"])
    task = task_of().resolve(rows, WHERE)
    assert task.model_options()["id2label"] == {0: "not_equivalent", 1: "equivalent"}
    assert labels_of(task, rows, tokenizer) == [1, 0]
    reordered = task_of(labels=["equivalent", "not_equivalent"]).resolve(rows, WHERE)
    assert labels_of(reordered, rows, tokenizer) == [0, 1]
    assert labels_of(task, rows_of(["equivalent"]), tokenizer) == [1], "names and declared names are the same thing"


def test_texts_and_pairs(tokenizer):
    rows = rows_of(["a", "b"], other=["second", "text here"])
    single = task_of().resolve(rows, WHERE).encode(rows, tokenizer, 16, WHERE, 0)
    assert single["input_ids"] == tokenizer(["text 0", "text 1"])["input_ids"]
    assert single["cut"] == [False, False]
    task = task_of(text=["text", "other"]).resolve(rows, WHERE)
    assert task.columns == ("text", "other", "label")
    pair = task.encode(rows, tokenizer, 16, WHERE, 0)
    expected = tokenizer(["text 0", "text 1"], ["second", "text here"])
    assert pair["input_ids"] == expected["input_ids"]
    assert pair["token_type_ids"] == expected["token_type_ids"]


@pytest.mark.parametrize(
    ("keys", "rows", "message"),
    [
        (
            {"text": "body"},
            rows_of(["a", "b"]),
            "`task.text` names the column `body`, .* its columns are `text`, `label`",
        ),
        ({"label": "y"}, rows_of(["a", "b"]), "`task.label` names the column `y`, but `rows.jsonl` has none"),
        ({"text": "n"}, rows_of(["a", "b"], n=[1, 2]), "`task.text` must name columns of strings, .*`n`.* holds int64"),
        ({}, rows_of([0.5, 1.0]), "must hold class names or integers from 0, but holds the number 0.5; to predict"),
        ({}, rows_of([[1], [2]]), r"`task.label` must .* holds List\("),
        ({}, rows_of(["a", "a"]), "must hold at least two classes, but holds a;"),
        ({}, rows_of([1, 2]), r'but holds 1, 2 and no 0; renumber them, or set `task.labels` to .* \["1", "2"\]$'),
        ({}, rows_of([0, 2, 5]), "without a gap, but holds 0, 2, 5 and no 1"),
        ({}, rows_of([-1, 0, 1]), "without a gap, but holds -1, 0, 1 and no 2"),
    ],
)
def test_a_training_split_without_classes_is_refused(keys, rows, message):
    with pytest.raises(DataError, match=message):
        task_of(**keys).resolve(rows, WHERE)


@pytest.mark.parametrize(
    ("train", "declared", "row", "message"),
    [
        (
            ["a", "b"],
            None,
            "c",
            "column `label`, row 12 of .* is the label 'c', which is not among the 2 classes .*: a, b$",
        ),
        (["a", "b"], None, None, "column `label`, row 12 of `rows.jsonl` is null"),
        ([0, 1], None, 2, "row 12 of `rows.jsonl` must be a class from 0 to 1, but is 2"),
        ([0, 1], None, -1, "row 12 of `rows.jsonl` must be a class from 0 to 1, but is -1"),
        ([0, 1], ["no", "yes"], -1, "row 12 of `rows.jsonl` must be a class from 0 to 1, but is -1"),
    ],
)
def test_a_label_that_does_not_fit_is_named_with_its_row(tokenizer, train, declared, row, message):
    task = task_of().resolve(rows_of(train, declared), WHERE)
    with pytest.raises(DataError, match=message):
        labels_of(task, rows_of([train[0], row], declared), tokenizer, first_row=10)


def test_integers_that_the_recipe_names_are_names(tokenizer):
    rows = rows_of([1, 2, 3, 1])
    task = task_of(labels=["1", "2", "3"]).resolve(rows, WHERE)
    assert labels_of(task, rows, tokenizer) == [0, 1, 2, 0]
    assert labels_of(task_of(labels=["3", "-1"]).resolve(rows, WHERE), rows_of([-1, 3]), tokenizer) == [1, 0]
    with pytest.raises(DataError, match=r"row 2 of .* must be a class of 1, 2, 3, but is 0"):
        labels_of(task, rows_of([3, 0]), tokenizer)


def test_a_declared_name_that_the_recipe_leaves_out(tokenizer):
    rows = rows_of([0, 1, 2], ["no", "yes", "maybe"])
    task = task_of(labels=["no", "yes"]).resolve(rows, WHERE)
    with pytest.raises(DataError, match=r"row 3 of .* is the label 'maybe', which is not among the 2 classes"):
        labels_of(task, rows, tokenizer)


def test_a_text_that_is_null_is_named_with_its_row(tokenizer):
    rows = datasets.Dataset.from_dict({"text": ["a", None], "label": ["x", "y"]})
    with pytest.raises(DataError, match=r"column `text`, row 6 of `rows.jsonl` is null"):
        task_of().resolve(rows, WHERE).encode(rows, tokenizer, 16, WHERE, 4)


def test_splits_must_write_labels_alike():
    with pytest.raises(
        DataError, match=r"of `v.jsonl` must hold class names, as the training split does, but holds int"
    ):
        resolved("a", "b").check_columns(rows_of([0, 1]).features, "`v.jsonl`")
    by_index = task_of().resolve(rows_of([0, 1]), WHERE)
    with pytest.raises(DataError, match="must hold integers, as the training split does, but holds class names"):
        by_index.check_columns(rows_of(["0", "1"]).features, "`v.jsonl`")


def test_f1_needs_two_classes():
    assert resolved("a", "b", metrics=["f1"]).metric_names == ("f1",)
    with pytest.raises(
        UsageError, match=r"`task.metrics` may name f1 only for two classes, .* has 3: a, b, c; use f1_macro"
    ):
        resolved("a", "b", "c", metrics=["f1"])


def test_options_need_resolved_labels():
    with pytest.raises(AssertionError, match="resolve"):
        task_of().model_options()


def test_the_loss_is_a_sum_in_float32():
    task = resolved("a", "b", "c")
    logits, labels = torch.randn(5, 3, dtype=torch.bfloat16), torch.tensor([0, 1, 2, 0, 1])
    loss = task.loss_sum(logits, labels)
    expected = -torch.log_softmax(logits.float(), -1)[torch.arange(5), labels].sum()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected)
    assert task.num_valid(labels) == 5
    halves = task.loss_sum(logits[:2], labels[:2]) + task.loss_sum(logits[2:], labels[2:])
    torch.testing.assert_close(halves, loss)


def test_metrics_over_pieces_equal_sklearn_over_the_whole():
    task = resolved("a", "b", "c", metrics=["accuracy", "f1_macro", "matthews"])
    logits, labels = torch.randn(101, 3), torch.randint(0, 3, (101,))
    pieces = [task.predictions(logits[part], labels[part]) for part in torch.arange(101).split(13)]
    gathered = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
    predicted = np.argmax(logits.numpy(), -1)
    assert task.metrics(gathered) == {
        "accuracy": sklearn.metrics.accuracy_score(labels, predicted),
        "f1_macro": sklearn.metrics.f1_score(labels, predicted, average="macro"),
        "matthews": sklearn.metrics.matthews_corrcoef(labels, predicted),
    }
    assert task.picture(gathered, None) == {
        "classes": ["a", "b", "c"],
        "confusion": sklearn.metrics.confusion_matrix(labels, predicted).tolist(),
    }


def test_many_classes_have_no_matrix_of_confusions():
    names = [str(number) for number in range(31)]
    assert resolved(*names).picture({"predictions": torch.zeros(2), "labels": torch.zeros(2)}, None) is None


def test_balanced_weights_equal_sklearn():
    names = ["a", "b", "b", "c", "b", "c"]
    expected = sklearn.utils.class_weight.compute_class_weight("balanced", classes=np.array(list("abc")), y=names)
    assert list(resolved(*names, class_weights="balanced").class_weights.values()) == pytest.approx(expected)


def test_weights_follow_their_classes():
    task = resolved("a", "b", class_weights={"b": 3.0, "a": 1.0}, label_smoothing=0.2)
    ordered, _ = task.in_checkpoint_order(("b", "a"), chosen=False)
    logits, labels = torch.randn(4, 2), torch.tensor([0, 1, 1, 1])
    expected = torch.nn.functional.cross_entropy(logits, labels, torch.tensor([3.0, 1.0]), label_smoothing=0.2)
    assert ordered.num_valid(labels) == 6
    torch.testing.assert_close(ordered.loss_sum(logits, labels) / 6, expected)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"class_weights": {"a": 1.0, "b": 1.0, "x": 2.0}}, "`task.class_weights` must name classes, but names 'x';"),
        ({"class_weights": {"a": 1.0}}, "must have a weight for each of the 2 classes, but has none for b; add it"),
        (
            {"class_weights": "balanced", "labels": ["a", "b", "rare"]},
            "is balanced, but `rows.jsonl` has no row of the class 'rare'; write the weights, or remove the class",
        ),
    ],
)
def test_weights_that_do_not_fit_the_classes(keys, message):
    with pytest.raises((DataError, UsageError), match=message):
        resolved("a", "b", **keys)


def test_the_fingerprint_depends_on_all_that_changes_the_features():
    tasks = [
        resolved("a", "b"),
        resolved("a", "c"),
        resolved("a", "b", labels=["b", "a"]),
        task_of(label="text").resolve(rows_of(["a", "b"]), WHERE),
    ]
    assert len({task.fingerprint for task in tasks}) == len(tasks)
    assert resolved("a", "b", metrics=["f1"]).fingerprint == tasks[0].fingerprint


class TestTheOrderOfACheckpoint:
    """The head of a fine-tuned checkpoint has an order of its own."""

    def test_is_taken_where_the_names_match(self, tokenizer):
        task, notes = resolved("negative", "positive").in_checkpoint_order(("Positive", "NEGATIVE"), chosen=False)
        assert task.model_options()["id2label"] == {0: "positive", 1: "negative"}
        assert notes == ["classes are in the order of the checkpoint: positive, negative"]
        assert labels_of(task, rows_of(["negative", "positive"]), tokenizer) == [1, 0]

    def test_is_taken_by_declared_names(self, tokenizer):
        rows = rows_of([0, 1], declared=["negative", "positive"])
        task, _ = task_of().resolve(rows, WHERE).in_checkpoint_order(("positive", "negative"), chosen=False)
        assert labels_of(task, rows, tokenizer) == [1, 0]

    @pytest.mark.parametrize("names", [("a", "b", "c"), ("b", "c"), ("a", "a ")])
    def test_names_that_match_in_part_are_refused(self, names):
        message = r"classes are .* training split has a, b; list the classes in `task.labels`"
        with pytest.raises(UsageError, match=message):
            resolved("a", "b").in_checkpoint_order(names, chosen=False)

    def test_the_order_of_the_recipe_stays_and_is_noted(self):
        task, notes = resolved("a", "b", labels=["a", "b"]).in_checkpoint_order(("b", "a"), chosen=True)
        assert task.model_options()["id2label"] == {0: "a", 1: "b"}
        assert notes == ["the checkpoint's classes are b, a, in another order or number than `task.labels`"]
        assert resolved("a", "b", labels=["a", "b"]).in_checkpoint_order(("a", "b"), chosen=True)[1] == []

    def test_other_names_are_noted_where_the_head_fits(self):
        task = resolved("a", "b")
        assert task.in_checkpoint_order(("x", "y"), chosen=False) == (
            task, ["the checkpoint's classes are x, y: its head starts from these, to learn others"],
        )  # fmt: skip
        assert task.in_checkpoint_order(("x", "y", "z"), chosen=False) == (task, [])

    @pytest.mark.parametrize("names", [("a", "b"), ("A", "B ")])
    def test_the_same_order_needs_no_note(self, names):
        task = resolved("a", "b")
        assert task.in_checkpoint_order(names, chosen=False) == (task, [])

    def test_an_index_means_the_same_in_both(self):
        task = task_of().resolve(rows_of([0, 1]), WHERE)
        same, (note,) = task.in_checkpoint_order(("1", "0"), chosen=False)
        assert same == task
        assert "labels are the numbers of the checkpoint's classes: 0 is '1', 1 is '0'" in note
