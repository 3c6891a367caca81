"""Whole runs of `task.type` seq2seq_lm, and the same training by a plain loop over transformers' model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from tests.helpers.seq2seq import write_seq2seq_run
from tests.helpers.training import tiny_recipe, tiny_training
from trainer.base.errors import DataError, ExitCode
from trainer.observe.metrics_file import read_metrics
from trainer.ranks.environment import LaunchEnvironment
from trainer.reading.loading import load_recipe
from trainer.training.run import run


def train(recipe: Path, *overrides: str) -> int:
    return run(load_recipe(str(recipe), overrides), LaunchEnvironment("none"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = write_seq2seq_run(
        tmp_path_factory.mktemp("seq2seq"),
        task={"prefix": "word0 ", "generation": {"num_beams": 2, "max_new_tokens": 8}},
    )
    assert train(recipe) == ExitCode.DONE
    return recipe


def test_a_run_evaluates_generated_texts(finished):
    evaluations = read_metrics(finished.parent / "run" / "metrics.jsonl").evaluations
    assert [set(record.metrics) for record in evaluations] == [{"loss", "rougeL", "bleu", "perplexity"}] * 2


def test_the_exported_folder_generates_with_transformers(finished):
    folder = finished.parent / "run" / "model"
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    settings = model.generation_config
    assert (settings.num_beams, settings.max_new_tokens) == (2, 8)
    assert (settings.eos_token_id, settings.pad_token_id, settings.decoder_start_token_id) == (1, 0, 0)
    tokens = model.generate(**tokenizer(["word0 word1 word2"], return_tensors="pt"))
    assert tokens.shape[0] == 1
    card = (folder / "README.md").read_text()
    assert "pipeline_tag: text2text-generation" in card
    code = card.partition("```python\n")[2].partition("```")[0]
    assert '"word0 ..."' in code
    exec(compile(code.replace("path/to/this/folder", str(folder)), "card", "exec"), {})


def test_a_bad_row_is_named_before_the_training(tmp_path):
    recipe = write_seq2seq_run(tmp_path)
    with (tmp_path / "train.jsonl").open("a") as lines:
        lines.write(json.dumps({"source": "word1", "target": None}) + "\n")
    with pytest.raises(DataError, match=r"column `target`, row 41 of .*train.jsonl.* is null"):
        train(recipe)


def test_a_plain_loop_learns_the_same():
    """The mean over the target tokens of each batch of 12 rows, without dropout, in one padded batch."""
    recipe = tiny_recipe(
        task={"type": "seq2seq_lm"},
        model={"dropout": 0.0},
        training={"max_steps": 8, "micro_batch_size": 5, "max_grad_norm": None},
        schedule={"name": "constant", "warmup": 0},
        optimizer={"weight_decay": 0.0},
    )
    with tiny_training(recipe) as training:
        model: Any = AutoModelForSeq2SeqLM.from_config(training.model.config, attn_implementation="eager")
        model.load_state_dict(training.model.state_dict())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
        for batch in training.loader:
            rows = torch.cat([microbatch.rows for microbatch in batch.microbatches])
            parts = [(m.inputs, m.labels) for m in batch.microbatches]
            assert len(rows) == batch.num_rows
            found = training.engine.train_step(batch).loss
            inputs = {name: stacked([part[name] for part, _ in parts], 0) for name in ("input_ids", "attention_mask")}
            loss = model(**inputs, labels=stacked([labels for _, labels in parts], -100)).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            assert found == pytest.approx(loss.item(), abs=1e-5)


def stacked(tensors: list[torch.Tensor], fill: int) -> torch.Tensor:
    width = max(tensor.shape[1] for tensor in tensors)
    return torch.cat([torch.nn.functional.pad(tensor, (0, width - tensor.shape[1]), value=fill) for tensor in tensors])
