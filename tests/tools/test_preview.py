"""Previews of every task: their marks are compared with the texts of the sample, and their numbers with the rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trainer
from tests.helpers.browser import needs_browser, open_page
from tests.helpers.tiny_run import write_tiny_run
from tests.helpers.training import tiny_recipe, tiny_training
from trainer.cli import main
from trainer.observe.preview_records import ShownText
from trainer.parallel.stored_in_parts import sizes_of_parts
from trainer.recipe.plan import plan_run
from trainer.tools import preview as tools_preview
from trainer.tools.preview import kinds
from trainer.tools.preview_rows import lengths_histogram
from trainer.training.describing import describe_model


def marked(text: ShownText, mark: str) -> str:
    return "".join(piece.text for piece in text.pieces if piece.mark == mark).strip()


def write_rows(folder: Path, rows: list[dict[str, object]]) -> None:
    for name in ("train.jsonl", "validation.jsonl"):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("recipe", "roles", "label", "trained"),
    [
        ("bert_sample", ["text"], "graphics", ""),
    ],
)
def test_the_tasks(recipe: str, roles: list[str], label: str, trained: str):
    assert_previewed(recipe, roles, label, trained)


def assert_previewed(recipe: str, roles: list[str], label: str, trained: str) -> None:
    found = trainer.preview(recipe, rows=1)
    (row,) = found.rows
    assert [text.role for text in row.texts] == roles
    assert row.label == label
    assert {marked(text, "trained") for text in row.texts} >= {trained}
    assert len(found.step) == 1
    assert found.kinds[1][0] == "trained"
    assert sum(count for _, count in found.splits[0].histogram) == (
        found.splits[0].rows if found.splits[0].longest else 0
    )


def test_packed_answers_end_with_the_end_token():
    (row,) = trainer.preview("sft_sample", rows=1).rows
    pieces = row.texts[0].pieces
    trained = [piece.text.strip() for piece in pieces if piece.mark == "trained"]
    documents = [piece for piece in pieces if piece.note.startswith("document")]
    assert len(trained) == len(documents) == 6
    assert all(text.endswith("[SEP]") and len(text.split()) == 2 for text in trained)


def test_hidden_tokens_are_shown_as_they_were():
    (row,) = trainer.preview("bert_sample_mlm", rows=1).rows
    assert marked(row.texts[0], "masked") == "can reset"
    assert "".join(piece.text for piece in row.texts[0].pieces).startswith(
        "[CLS] the optional parameter newscmprio can be"
    )


def test_cut_rows_weights_and_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    recipe = str(write_tiny_run(tmp_path, task={"class_weights": {"no": 3.0, "yes": 1.0}}, data={"max_length": 6}))
    settings = tmp_path / "tokenizer" / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "model_max_length": 6}))
    write_rows(
        tmp_path, [{"text": f"word1 word2 word3 word4 word{row}", "label": ["no", "yes"][row % 2]} for row in range(40)]
    )
    assert main(["preview", recipe, "--rows", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(one["name"], one["rows"], one["weight"]) for one in found["classes"]] == [
        ("no", 20, 3.0),
        ("yes", 20, 1.0),
    ]
    assert found["splits"][0]["cut"] == 40
    assert found["splits"][0]["uncut"][-1] == [7, 40]
    assert found["rows"][0]["texts"][0]["pieces"][-1]["mark"] == "cut"
    assert any("most training rows are truncated: 40 of 40" in note for note in found["notes"])
    own, other = (trainer.preview(recipe, processes=2, rank=rank).step for rank in (0, 1))
    assert {row.row for row in own}.isdisjoint(row.row for row in other)
    assert main(["preview", recipe, "--rank", "1"]) == 2
    assert "must be below the data-parallel size 1" in capsys.readouterr().err


def trainer_split(labels: list[int], ids: list[int] | None = None, scalars: dict[str, Any] | None = None):
    from trainer.data.split import EncodedSplit

    tokens = {"input_ids": np.array(ids or range(6), np.int32)}
    if labels:
        tokens["labels"] = np.array(labels, np.int32)
    return EncodedSplit(np.array([0, 3, 6]), tokens, scalars or {}, "hash", texts_per_row=1 if ids is None else 2)


def test_a_histogram_counts_each_length_once():
    assert lengths_histogram(np.array([1, 1, 2, 20])) == (
        (2, 3),
        (4, 0),
        *((edge, 0) for edge in range(6, 20, 2)),
        (20, 1),
    )
    assert lengths_histogram(np.zeros(0, int)) == ()


ADAPTER = {"adapter": {"type": "lora", "rank": 4}}


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"precision": "bf16", "weights": "bf16_stochastic"},
        {"precision": "bf16", "model": ADAPTER},
        {"precision": "bf16", "model": {**ADAPTER, "quantization": "nf4"}},
        *(
            pytest.param(
                {"parallel": {"strategy": name}, "precision": "bf16", "model": ADAPTER},
                marks=() if name == "zero3" else pytest.mark.slow,
            )
            for name in ("zero1", "zero2", "zero3")
        ),
    ],
    ids=["fp32", "16 bits", "adapter", "4 bits", "zero1", "zero2", "zero3"],
)
def test_kinds_equal_those_of_an_engine(ranks: Any, keys: dict[str, Any]):
    """DeepSpeed needs a process group, and so a process of its own."""
    (shown, counted), *_ = ranks(1).run(kinds_of, keys) if "parallel" in keys else [kinds_of(keys)]
    assert {(row[0], row[2]): int(row[1].replace(",", "")) for row in shown[1:]} == counted
    assert all(row[6].endswith("fp32") for row in shown[1:] if row[0] == "trained")


def kinds_of(keys: dict[str, Any]) -> tuple[Any, dict[tuple[str, str], int]]:
    """Return the kinds of a preview, and the parameters of an engine by whether they are trained, and their type."""
    recipe = tiny_recipe(**keys)
    with tiny_training(recipe) as training:
        shown = kinds(plan_run(recipe, 1), describe_model(recipe, training.parts.task))
        whole = sizes_of_parts([training.model])
        counted: dict[tuple[str, str], int] = {}
        for name, parameter in training.model.named_parameters():
            held = "nf4" if name in whole else {torch.float32: "fp32", torch.bfloat16: "bf16"}[parameter.dtype]
            kind = ("trained" if parameter.requires_grad else "frozen", held)
            counted[kind] = counted.get(kind, 0) + whole.get(name, getattr(parameter, "ds_numel", parameter.numel()))
        training.steps(1)
        moments = [part for part in training.engine.state().parts if part.name.startswith("optimizer.")]
        assert {box.view.dtype for part in moments for box in part.boxes if part.shape} == {torch.float32}
    return shown, counted


def test_labels_and_a_sample_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    recipe = write_tiny_run(tmp_path)
    task = {"type": "sequence_classification", "text": "text", "multi_label": True}
    recipe.write_text(json.dumps({**json.loads(recipe.read_text()), "task": task}))
    write_rows(tmp_path, [{"text": f"word{row}", "label": ["a", "b"] if row % 2 else []} for row in range(40)])
    monkeypatch.setattr(tools_preview, "_MOST_ROWS", 12)
    sample = trainer.preview(str(recipe), rows=2)
    assert ([row.label for row in sample.rows], sample.step, sample.splits[0].rows) == (["", "a, b"], (), 12)
    assert any(note.startswith("only the first 12 rows of") for note in sample.notes)


@needs_browser
def test_the_page_and_the_report_show_the_marks(tmp_path: Path):
    recipe = str(write_tiny_run(tmp_path))
    assert main(["run", recipe, "training.max_steps=1"]) == 0
    assert main(["report", str(tmp_path / "run")]) == 0
    assert "First step of run" in (tmp_path / "run" / "report.html").read_text()
    assert main(["preview", "ner_sample", "--rows", "1", "-o", str(tmp_path / "page.html")]) == 0
    opened = open_page(tmp_path / "page.html", tmp_path)
    assert (opened.console, opened.requests) == ([], [])
    assert '<span class="trained" title="trained"> json<sub>B-CLASS</sub></span>' in opened.dom
