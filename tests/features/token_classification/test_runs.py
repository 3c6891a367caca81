"""Runs of the task `token_classification` on rows of the sample: its curve, its metrics over ranks and its export."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import AutoTokenizer, pipeline

import trainer
from tests.helpers.ranks import RankPools
from tests.helpers.tiny_run import write_tiny_run
from tests.helpers.training import TINY_BERT, tiny_recipe, tiny_training
from trainer.data.collate import Padding
from trainer.data.loader import EvalLoader
from trainer.data.sources import Split
from trainer.data.tokenised_split import encode_split
from trainer.observe.observer import Observer
from trainer.tasks.registry import build_task
from trainer.tasks.types import EvaluatedSplit
from trainer.training.whole_split import Evaluator, cat_padded

ROOT = Path(__file__).parents[3]
SAMPLE = ROOT / "recipes" / "sample"
MODEL = {**TINY_BERT, "vocab_size": 3000, "max_position_embeddings": 128, "initializer_range": 0.2}
TAGS = ["O", *(f"{part}-{kind}" for kind in ("CLASS", "EXCEPTION", "IDENTIFIER", "MODULE") for part in "BI")]
WORDS = {"type": "token_classification", "words": "words", "tags": "tags", "labels": TAGS}
TEXT = {"type": "token_classification", "text": "text", "spans": "spans", "labels": TAGS}
STEPS = 4


def rows_of(number: int) -> list[dict[str, Any]]:
    """Return rows of the sample as words with tags, and as texts with spans."""
    rows = []
    lines = (
        (ROOT / "trainer" / "features" / "token_classification" / "recipes" / "train.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()
    )
    for line in [line for line in lines if '"B-' in line][:number]:
        row = json.loads(line)
        start, spans = 0, []
        for word, tag in zip(row["words"], row["tags"], strict=True):
            if tag.startswith("B-"):
                spans.append({"start": start, "end": start + len(word), "label": tag[2:]})
            elif tag.startswith("I-"):
                spans[-1]["end"] = start + len(word)
            start += len(word) + 1
        rows.append({**row, "text": " ".join(row["words"]), "spans": spans})
    return rows


def write(folder: Path, number: int, **sections: Any) -> Path:
    recipe = write_tiny_run(folder, **{"data": {"max_length": 128}, "schedule": {"name": "constant", "warmup": 0}})
    described = json.loads(recipe.read_text())
    described |= {"task": WORDS, "model": {"config": MODEL, "tokenizer": str(SAMPLE / "tokenizer"), "dropout": 0}}
    described["optimizer"] |= {"weight_decay": 0.0, "learning_rate": 1e-4}
    described["training"] = {
        "max_steps": STEPS, "global_batch_size": number, "micro_batch_size": 5, "max_grad_norm": None
    }  # fmt: skip
    recipe.write_text(json.dumps({**described, **sections}))
    for split in ("train", "validation"):
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows_of(number))) + "\n")
    return recipe


def plain_losses(model: Any, rows: list[dict[str, Any]]) -> list[float]:
    """Train with the loss of transformers on the whole batch, aligned as in its documentation."""
    tokenizer = AutoTokenizer.from_pretrained(SAMPLE / "tokenizer")
    inputs = tokenizer([row["words"] for row in rows], is_split_into_words=True, padding=True, return_tensors="pt")
    labels = torch.full_like(inputs["input_ids"], -100)
    for place, row in enumerate(rows):
        last = None
        for token, word in enumerate(inputs.word_ids(place)):
            if word is not None and word != last:
                labels[place, token] = TAGS.index(row["tags"][word])
            last = word
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    losses = []
    for _ in range(STEPS):
        loss = model(**inputs, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_plain_loop_learns_the_same_and_a_pipeline_finds_the_same(tmp_path):
    rows = rows_of(24)
    with trainer.assemble(write(tmp_path, 24)) as parts:
        plain = copy.deepcopy(parts.models[0])
        losses = [parts.engine.train_step(batch).loss for batch in parts.train_loader]
        parts.export(tmp_path / "model")
    assert losses == pytest.approx(plain_losses(plain, rows), abs=1e-5)
    assert losses[-1] < losses[0]

    model = {"name_or_path": str(tmp_path / "model")}
    with trainer.assemble(write(tmp_path / "again", 24, task=TEXT, model=model)) as parts:
        loader = EvalLoader(parts.data.validation, 5, 0, 1, parts.data.preparation.batching)
        found = [(batch.rows, parts.engine.answer(batch)) for batch in loader]
        order = torch.cat([places for places, _ in found]).argsort()
        answers = {name: cat_padded([part[name] for _, part in found])[order] for name in ("predictions", "scores")}
        ours = parts.task.readable(answers, parts.data.evaluated)
    finder = pipeline("token-classification", str(tmp_path / "model"), aggregation_strategy="first", device="cpu")
    theirs = [finder(row["text"]) for row in rows]
    assert sum(map(len, theirs)) > 20
    for own, other in zip(ours, theirs, strict=True):
        entities = [(entity["label"], entity["start"], entity["end"]) for entity in own["entities"]]
        assert entities == [(entity["entity_group"], entity["start"], entity["end"]) for entity in other]
        scores = [entity["score"] for entity in own["entities"]]
        assert scores == pytest.approx([float(entity["score"]) for entity in other], abs=1e-5)


def evaluate_all(folder: Path) -> dict[str, float]:
    """Evaluate windows of 12 tokens over all ranks."""
    rows = datasets.Dataset.from_list(rows_of(90)).select_columns(["words", "tags"])
    keys = {**WORDS, "metrics": ["f1", "f1_macro", "accuracy"]}
    recipe = tiny_recipe(task=keys, model={"config": MODEL, "tokenizer": "none"})
    task = build_task(recipe.task).resolve(rows, "rows")
    tokenizer = AutoTokenizer.from_pretrained(SAMPLE / "tokenizer")
    encoded = encode_split(Split(rows, "rows"), task, tokenizer, 12, folder)
    assert len(encoded) > 2 * len(rows)
    with tiny_training(recipe) as training:
        mesh = training.mesh
        loader = EvalLoader(encoded, 4, mesh.index("dp"), mesh.size("dp"), Padding(0))
        split = EvaluatedSplit(rows, encoded, tokenizer, "rows")
        return Evaluator(training.engine, loader, len(encoded), task, mesh, Observer(), split).evaluate().metrics


def test_metrics_over_ranks_equal_one_process(ranks: RankPools, tmp_path):
    expected = evaluate_all(tmp_path)
    assert 0 < expected["f1"] < 1
    for found in ranks(3).run(evaluate_all, tmp_path):
        assert found == pytest.approx(expected, abs=1e-6)
