"""Warnings on training data, by `check`, `preview` and `run`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

from tests.helpers.tiny_run import write_tiny_run
from tests.helpers.training import TINY_DECODERS
from tests.tools.test_check import labelled, prepared, write_rows
from tests.tools.test_preview import trainer_split
from tests.tools.test_preview import write_rows as write_both
from trainer.cli import main
from trainer.features.data_warnings.answer_warnings import answer_notes
from trainer.recipe.reading.loading import load_recipe
from trainer.tasks.registry import build_task
from trainer.training.data_notes import class_counts
from trainer.training.run_data import prepare_data


def test_labels_of_a_single_class(tmp_path):
    recipe = write_tiny_run(tmp_path, task={"metrics": ["f1"], "positive": "no"}, data={"validation": "train.jsonl"})
    rows = [{"text": f"word{row}", "label": ["no", "No "][row > 0]} for row in range(9)]
    write_rows(tmp_path / "train.jsonl", rows)
    data = prepare_data(load_recipe(str(recipe)).recipe)
    assert [note for note in data.data_notes if "rows that" not in note] == [
        "the classes 'No ' and 'no' differ only in case, space or form of Unicode; if they are one class, fix the"
        " labels",
        "the class 'no' has one training row; a typo in a label creates such a class",
        "the validation split holds the rows of the training split, so metrics do not show new rows",
    ]
    assert class_counts(data.task, data.train) == (("No ", 8), ("no", 1))
    found = data.task.metrics({"predictions": torch.tensor([1, 1, 0]), "labels": torch.tensor([1, 0, 0])})
    assert found["f1"] == pytest.approx(2 / 3)
    other = replace(data.task, positive="No ").metrics(
        {"predictions": torch.tensor([1, 1, 0, 0]), "labels": torch.tensor([1, 0, 0, 0])}
    )
    assert other["f1"] == pytest.approx(0.8), "precision 1, recall 2/3"


@pytest.mark.parametrize(
    ("labels", "shown"),
    [
        (["Crime; Drama", "Drama", "Comedy; Crime"], "Comedy; Crime"),
        (["['a']", "['a', 'b']"], "['a', 'b']"),
        (["0", "1", "neg", "pos"], "0', '1"),
        (["Arts, Crafts", "1", "Food"], None),
    ],
)
def test_classes_that_are_lists_in_texts_or_of_two_kinds(tmp_path, labels, shown):
    recipe = write_tiny_run(tmp_path)
    for name in ("train.jsonl", "validation.jsonl"):
        write_rows(tmp_path / name, [{"text": f"word{row}", "label": labels[row % len(labels)]} for row in range(9)])
    notes = prepare_data(load_recipe(str(recipe)).recipe).data_notes
    found = [note for note in notes if "looks like a list" in note or "are numbers, and 'neg', 'pos' are words" in note]
    assert [shown in note for note in found] == ([True] if shown else [])


def test_classes_of_other_forms_of_unicode_and_with_invisible_characters(tmp_path):
    rows = labelled(40)
    for row, label in enumerate(("pr\u00e9sent", "pre\u0301sent", "pre\u0301\u200bsent\u00a0")):
        rows[row]["label"] = rows[row + 3]["label"] = label
    notes = prepared(tmp_path, rows, labelled(8, first=50)).data_notes
    (found,) = (note for note in notes if "Unicode" in note)
    assert found.startswith(
        r"the classes 'pre\u0301sent' and 'pre\u0301\u200bsent\xa0' and 'pr\xe9sent' differ only in"
    )


def test_missing_and_shared_rows_of_splits(tmp_path):
    train, validation = labelled(40), [*labelled(3, "a", 50), *labelled(5, "a", 0)]
    train += [{"text": train[0]["text"], "label": "b"}]
    blank = [{"text": " ", "label": "a"}]
    data = prepared(tmp_path, train + blank, validation, training={"global_batch_size": 64})
    assert [note for note in data.data_notes if "became" not in note] == [
        "`training.global_batch_size` is 64, but a step has at most the 42 rows of an epoch",
        "the validation split has no row of 'b'",
        "1 of 42 training rows have the tokens of another row with another label",
        "5 of 8 validation rows have the tokens of a training row",
    ]
    assert "special tokens only: 1 of 42 training rows, which have no text" in data.notes(16)


def test_labels_of_one_number(tmp_path):
    task = {"type": "sequence_regression", "text": "text", "label": "label", "metrics": ["pearson"]}
    data = prepared(tmp_path, labelled(20, 1.5), labelled(8, 2.5, 50), task=task)
    assert "all validation labels are 2.5, so correlations are undefined, and shown as 0" in data.data_notes


def test_a_class_without_rows_and_cut_rows_are_noted_by_each_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    recipe = write_tiny_run(tmp_path, task={"labels": ["no", "yes", "rare"]}, data={"max_length": 6})
    words = "word1 word2 word3 word4"
    write_both(tmp_path, [{"text": f"{words} word{row}", "label": ["no", "yes"][row % 2]} for row in range(40)])
    for verb in ("check", "preview", "run"):
        assert main([verb, str(recipe), "training.max_steps=1", 'logging.to=["console"]']) == 0
        shown = " ".join("".join(capsys.readouterr()).split())
        assert "no training row has the class 'rare'" in shown, verb
        assert "are truncated: 40 of 40" in shown, verb


def test_trained_prompts_are_noted_by_each_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    task = {"type": "causal_lm", "prompt": "prompt", "completion": "completion"}
    recipe = write_tiny_run(tmp_path)
    keys = json.loads(recipe.read_text()) | {"task": task}
    keys["model"]["config"] = TINY_DECODERS["llama"]
    recipe.write_text(json.dumps(keys))
    write_both(tmp_path, [{"prompt": "", "completion": f"word{row} word2"} for row in range(40)])
    for verb in ("check", "preview", "run"):
        assert main([verb, str(recipe), "training.max_steps=1", 'logging.to=["console"]']) == 0
        assert "all tokens of the training rows are trained, those of prompts too" in capsys.readouterr().out, verb


class TestNotesOnAnswers:
    @pytest.mark.parametrize(
        ("labels", "note"),
        [
            ([-100, 5, 3, -100, 6, 3], None),
            ([-100, 5, 6, -100, 6, 5], "no end token"),
            ([-100] * 6, "no token of the training rows"),
            ([4, 5, 3, 4, 6, 3], "those of prompts too"),
            ([-100, -100, -100, -100, 6, 3], "no token is trained in 1 of 2"),
            ([-100, 7, 3, -100, 6, 3], "1 of 2 trained answers are empty"),
            ([-100, 5, 3, 6, 3, 3], "1 trained answers have two end tokens"),
        ],
    )
    def test_notes(self, labels: list[int], note: str | None):
        class Tokenizer:
            eos_token_id, chat_template, added_tokens_decoder = 3, None, MappingProxyType({3: "</s>"})

            def decode(self, ids: list[int]) -> str:
                return {3: "</s>", 7: " \n"}.get(ids[0], "word")

        task = build_task(load_recipe("sft_sample").recipe.task)
        split = trainer_split(labels)
        found = answer_notes(task, split, Tokenizer())  # type: ignore[arg-type]
        assert len(found) == (note is not None)
        assert note is None or note in found[0]
