"""Files as people have them: `trainer init` reads each, and its recipe loads the rows that it names."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM, BertForSequenceClassification

from trainer.base.errors import ExitCode
from trainer.cli import main
from trainer.data.sources import load_splits
from trainer.recipe.reading.loading import load_recipe
from trainer.tools.init import models, proposal

WORDS = ("das war gut", "schrecklich, böse", "naïve café", "nice one", "awful")
NUMBER = 40


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        proposal, "plan_recipe", lambda _, devices: SimpleNamespace(needed=2**30, devices=devices, fits=True)
    )


def text(row: int) -> str:
    return f"{WORDS[row % len(WORDS)]} {row}"


def table(**columns: Callable[[int], Any]) -> dict[str, list[Any]]:
    return {name: [value(row) for row in range(NUMBER)] for name, value in columns.items()}


def as_csv(columns: dict[str, list[Any]], delimiter: str = ",") -> str:
    written = io.StringIO()
    writer = csv.writer(written, delimiter=delimiter)
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    return written.getvalue()


def label(row: int) -> str:
    return "pn"[row % 2]


PLAIN = table(text=text, label=label)
HOLES = table(text=lambda row: text(row) if row % 9 else "", label=lambda row: label(row) if row % 7 else " ")

WIDE = {"text": PLAIN["text"], **{f"c{place}": [0.5] * NUMBER for place in range(198)}, "label": PLAIN["label"]}
NAMED = table(**{"": str, "Review Text": text, "User": lambda row: f"u{row % 3}", "Sentiment (manual)": label})
FLAGS = table(id=lambda row: f"{row:016x}", comment_text=text, toxic=lambda row: row % 2, rude=lambda row: row % 3 // 2)


def write_workbook(path: Path) -> None:
    with pd.ExcelWriter(path) as book:
        pd.DataFrame({"About": ["this file", "version 1"]}).to_excel(book, sheet_name="Read me", index=False)
        pd.DataFrame(PLAIN).to_excel(book, sheet_name="Data", index=False)
        pd.DataFrame().to_excel(book, sheet_name="Empty", index=False)


def write_parquet(path: Path) -> None:
    price = pa.array([Decimal(f"{row}.50") if row % 10 else None for row in range(NUMBER)], pa.decimal128(10, 2))
    day = [date(2024, 1, 1 + row % 28) for row in range(NUMBER)]
    pq.write_table(pa.table({"text": [text(row) for row in range(NUMBER)], "price": price, "day": day}), path)


@pytest.mark.parametrize(
    ("name", "content", "task", "shown", "num_rows"),
    [
        ("a.csv", as_csv(PLAIN).encode("latin-1"), {"label": "label"}, "encoding cp1252: a guess, by which a word", 40),
        ("a.csv", as_csv(PLAIN).encode("utf-16"), {"label": "label"}, "encoding utf-16: by its first bytes", 40),
        ("a.csv", as_csv(PLAIN).encode("utf-8-sig"), {"label": "label"}, "label (text, 2 distinct)\n", 40),
        (
            "a.csv",
            as_csv(table(text=text, score=lambda row: f"{row / 7:.2f}".replace(".", ",")), ";").encode(),
            {"type": "sequence_regression"},
            "is read with semicolons",
            40,
        ),
        ("a.tsv", as_csv(PLAIN, "\t").encode(), {"label": "label"}, "2 classes", 40),
        (
            "a.jsonl",
            "".join(
                json.dumps({"meta": {"a": [1]}, "text": text(row), "label": label(row)}) + "\n" for row in range(NUMBER)
            ).encode(),
            {"text": "text"},
            "the task does not read meta (object)",
            40,
        ),
        ("a.xlsx", write_workbook, {"label": "label"}, "sheet Data: the first with columns for a task; others:", 40),
        (
            "a.parquet",
            write_parquet,
            {"type": "sequence_regression", "label": "price"},
            "leaves out 4 of 40 rows: `price` is null in 4",
            36,
        ),
        (
            "a.csv",
            as_csv(HOLES).encode(),
            {"label": "label"},
            "leaves out 10 of 40 rows: `text` is null in 5, `label` is blank in 6",
            30,
        ),
        ("a.csv", as_csv({"text": PLAIN["text"]}).encode(), {"type": "causal_lm"}, "no column has labels", 40),
        (
            "a.csv",
            as_csv(WIDE).encode(),
            {"label": "label"},
            "and 188 more",
            40,
        ),
        (
            "a.csv",
            as_csv(NAMED).encode(),
            {"label": "Sentiment (manual)", "text": "Review Text"},
            "2 classes",
            40,
        ),
        (
            "a.csv",
            as_csv(table(text=text, code=lambda row: ("007", "010", "123")[row % 3])).encode(),
            {"label": "code"},
            "`code` has 3 classes",
            40,
        ),
        (
            "a.csv",
            as_csv(FLAGS).encode(),
            {"text": "comment_text", "multi_label": True, "labels": ["toxic", "rude"]},
            "2 columns of 0 and 1",
            40,
        ),
        (
            "a.csv",
            as_csv(table(text=text, price=lambda row: f"{1000 + 137 * row:,}.50")).encode(),
            {"type": "sequence_regression"},
            "`price` holds numbers",
            40,
        ),
        (
            "a.csv",
            as_csv(table(prompt=text, completion=text, label=lambda row: ("Good", "bad")[row % 2])).encode(),
            {"type": "preference", "label": "label"},
            "good or bad (KTO)",
            40,
        ),
    ],
)  # fmt: skip
def test_the_recipe_of_an_odd_file_loads_its_rows(
    name: str,
    content: bytes | Callable[[Path], None],
    task: dict[str, Any],
    shown: str,
    num_rows: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if callable(content):
        content(Path(name))
    else:
        Path(name).write_bytes(content)
    assert main(["init", name, "--yes"]) == ExitCode.DONE
    assert shown in capsys.readouterr().out
    recipe = load_recipe("a.yaml").recipe
    assert {key: getattr(recipe.task, key) for key in task} == task
    splits = load_splits(recipe.data, columns=[value for value in task.values() if isinstance(value, str)])
    assert splits.validation is not None
    assert len(splits.train.rows) + len(splits.validation.rows) == num_rows


def test_rows_without_values_of_the_validation_file_are_left_out_too(capsys: pytest.CaptureFixture[str]) -> None:
    """Without columns of 0 and 1 among the other labels, and with one line on the rows."""
    Path("a.csv").write_text(as_csv(FLAGS))
    Path("b.csv").write_text(as_csv({**FLAGS, "comment_text": ["", *FLAGS["comment_text"][1:]]}))
    assert main(["init", "a.csv", "data.validation=b.csv", "--yes"]) == ExitCode.DONE
    out = capsys.readouterr().out
    assert "leaves out 1 of 40 validation rows: `comment_text` is null in 1" in out
    assert "are left out" not in out
    assert "task.label=" not in out
    data = load_recipe("a.yaml").recipe.data
    splits = load_splits(data)
    assert (len(splits.train.rows), splits.validation and len(splits.validation.rows)) == (40, 39)


@pytest.mark.parametrize(
    ("override", "texts"), [((), None), (("task.type=embedding",), ["sentence1", "sentence2"])]
)  # fmt: skip
def test_scored_pairs_become_embeddings_if_asked(
    override: tuple[str, ...], texts: list[str] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = table(sentence1=text, sentence2=lambda row: text(row + 1), score=lambda row: row % 6 / 5)
    pd.DataFrame(pairs).to_parquet("STS.parquet")
    assert main(["init", "STS.parquet", "--yes", *override]) == ExitCode.DONE
    recipe = load_recipe("STS.yaml").recipe
    assert getattr(recipe.task, "texts", None) == texts
    if texts:
        assert (recipe.task.type, getattr(recipe.task, "score", None)) == ("embedding", "score")
        short = ["training.max_steps=2", "evaluation.verify_export=0"]
        assert main(["run", "STS.yaml", *short]) == ExitCode.DONE
    capsys.readouterr()


def fill_cache(home: Path, name: str, num_classes: int | None) -> None:
    """Write a model into a cache of the hub; None: one without a head for classes."""
    folder = home / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    AutoTokenizer.from_pretrained(Path(__file__).parents[3] / "recipes/sample/tokenizer").save_pretrained(snapshot)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(vocab_size=3000, max_position_embeddings=128, **sizes)
    if num_classes is None:
        BertForMaskedLM(config).save_pretrained(snapshot)
    else:
        config.num_labels = num_classes
        BertForSequenceClassification(config).save_pretrained(snapshot)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_a_pretrained_model_of_the_cache_is_the_default_and_trains(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("a.csv").write_text(as_csv(HOLES), encoding="utf-8")
    assert main(["init", "a.csv", "--yes"]) == ExitCode.DONE
    assert "sample: small, random weights, since no hub answers; pretrained: --model google-" in capsys.readouterr().out
    fill_cache(cache, "google-bert/bert-base-uncased", None)
    assert main(["init", "a.csv", "--yes", "--overwrite"]) == ExitCode.DONE
    shown = "google-bert/bert-base-uncased: pretrained, in the hub's cache, with the learning rate 0.0001\n"
    assert shown in capsys.readouterr().out
    assert main(["run", "a.yaml", "training.max_steps=2", "evaluation.verify_export=0"]) == ExitCode.DONE


def test_a_head_of_other_classes_is_replaced(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.csv").write_text(as_csv(PLAIN), encoding="utf-8")
    fill_cache(cache, "some/three", 3)
    fill_cache(cache, "some/two", 2)
    assert main(["init", "a.csv", "--yes", "--model", "some/three"]) == ExitCode.DONE
    assert "head      a new one with random weights" in capsys.readouterr().out
    assert load_recipe("a.yaml").recipe.model.new_head
    assert main(["check", "a.yaml"]) == ExitCode.DONE
    assert main(["init", "a.csv", "--yes", "--model", "some/two", "--overwrite"]) == ExitCode.DONE
    assert not load_recipe("a.yaml").recipe.model.new_head
    for weights in cache.glob("*/snapshots/abc/model.safetensors"):
        weights.unlink()
    for name, is_new in (("some/three", True), ("some/two", False)):  # by their configurations alone
        assert main(["init", "a.csv", "--yes", "--model", name, "--overwrite"]) == ExitCode.DONE
        assert load_recipe("a.yaml").recipe.model.new_head == is_new


@pytest.mark.slow
@pytest.mark.parametrize(("status", "name"), [(200, "google/bert_uncased_L-4_H-256_A-4"), (503, models.SAMPLE)])
def test_a_hub_that_answers_gives_the_default(
    status: int, name: str, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(models, "answer_of", lambda _: status)
    Path("a.csv").write_text(as_csv(PLAIN), encoding="utf-8")
    assert main(["init", "a.csv", "--yes", "--gpus", "CPU"]) == ExitCode.DONE
    recipe = load_recipe("a.yaml").recipe
    assert (recipe.model.name_or_path or models.SAMPLE) == name
    capsys.readouterr()


def test_rows_that_cannot_be_trained_are_named_by_their_lines(capsys: pytest.CaptureFixture[str]) -> None:
    chats = [[{"role": "user", "content": text(row)}, {"role": "assistant", "content": "yes"}] for row in range(NUMBER)]
    bad = (0, 24, 38)
    for row in bad:
        chats[row].pop()
    Path("a.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats), encoding="utf-8")
    assert main(["init", "a.jsonl", "--yes", "data.validation=0.5"]) == ExitCode.USER
    shown = capsys.readouterr()
    assert shown.out.endswith(
        "wrote     a.yaml, which cannot train before the errors below are mended\nnext      trainer check a.yaml\n"
    )
    lines = [int(number) for number in re.findall(r"line (\d+)\)", shown.err)]
    assert {row + 1 for row in bad if row} == {*lines}


def test_documents_of_a_query_may_be_ranked(capsys: pytest.CaptureFixture[str]) -> None:
    pairs = table(query=lambda row: f"what is {row // 4}", document=text, relevance=lambda row: int(row % 4 == 0))
    Path("a.csv").write_text(as_csv(pairs), encoding="utf-8")
    assert main(["init", "a.csv", "--yes"]) == ExitCode.DONE
    fitting = "task.type=sequence_regression, task.type=reranker, task.type=embedding"
    assert f"the columns also fit {fitting}\n" in capsys.readouterr().out
    assert main(["init", "a.csv", "--yes", "--overwrite", "task.type=reranker"]) == ExitCode.DONE
    task = load_recipe("a.yaml").recipe.task.model_dump()
    assert (task["query"], task["documents"], task["label"]) == ("query", "document", "relevance")
    lists = [{"query": text(row), "documents": ["a", "b c"], "labels": [1, 0]} for row in range(NUMBER)]
    Path("b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lists), encoding="utf-8")
    assert main(["init", "b.jsonl", "--yes"]) == ExitCode.DONE
    assert load_recipe("b.yaml").recipe.task.type == "reranker"
