"""Whole runs of `task.type` seq2seq_lm, and the same training by a plain loop over transformers' model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from tests.helpers.plain_loops import losses_of_both, mean_of_batch
from tests.helpers.seq2seq import multilingual_tokenizer, write_seq2seq_run
from tests.helpers.training import sgd_sections, tiny_recipe, tiny_training
from trainer.base.errors import DataError, ExitCode, UsageError
from trainer.ranks.environment import LaunchEnvironment
from trainer.recipe.reading.loading import load_recipe
from trainer.tools.run_metrics import read_metrics
from trainer.training.row_encoding import load_preparation
from trainer.training.run import run
from trainer.training.run_data import prepare_data


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


LANGUAGES = {"mbart": ("en_XX", "ro_RO"), "m2m_100": ("eng_Latn", "fra_Latn")}


def write_multilingual_run(folder: Path, model_type: str, *languages: str) -> Path:
    keys = dict(zip(("source_language", "target_language"), languages, strict=False))
    recipe = write_seq2seq_run(folder, task={**keys, "max_target_length": 60})
    tokenizer = multilingual_tokenizer(model_type)
    tokenizer.save_pretrained(folder / "tokenizer")
    content = json.loads(recipe.read_text())
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 64}
    drops = {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "dropout": 0.0, "init_std": 0.5}
    tokens = {"vocab_size": len(tokenizer), "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
    content["model"]["config"] = {"model_type": model_type, **sizes, **heads, **drops, **tokens}
    content["data"]["max_length"] = 60
    recipe.write_text(json.dumps(content))
    return recipe


@pytest.mark.parametrize("model_type", LANGUAGES)
def test_a_multilingual_model_learns_and_generates_the_target_language(tmp_path, model_type):
    source, target = LANGUAGES[model_type]
    recipe = write_multilingual_run(tmp_path, model_type, source, target)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer", src_lang=source, tgt_lang=target)
    row = json.loads((tmp_path / "train.jsonl").open().readline())
    cut = {"truncation": True, "max_length": 60, "return_tensors": "pt"}
    expected = tokenizer(row["source"], text_target=row["target"], **cut)
    encoded = prepare_data(load_recipe(str(recipe)).recipe).train
    assert encoded.tokens["input_ids"][: encoded.offsets[1]].tolist() == expected["input_ids"][0].tolist()
    labels, starts = (
        torch.tensor(column.values[: column.offsets[1]])[None]
        for column in (encoded.ragged["labels"], encoded.ragged["decoder_input_ids"])
    )
    assert labels.tolist() == expected["labels"].tolist()

    assert train(recipe) == ExitCode.DONE
    folder = tmp_path / "run" / "model"
    model, exported = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    losses = [model(**{**expected, **beside}).loss for beside in ({}, {"decoder_input_ids": starts})]
    torch.testing.assert_close(*losses)  # transformers shifts the labels of the first
    assert (exported.src_lang, exported.tgt_lang) == (source, target)
    generated = model.generate(**exported(row["source"], **cut))[0].tolist()
    end, language = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(target)
    first = [language] if model_type == "mbart" else [end, language]
    assert generated[: len(first)] == first


@pytest.mark.parametrize(
    ("languages", "message"),
    [
        ((), r"`task.source_language` must be a language .* but is null; write one such as"),
        (("en_XX",), r"`task.target_language` must be a language .* but is null"),
        (("en_XX", "ro_R"), r"`task.target_language` must be .* but is 'ro_R'; write one such as ro_RO"),
    ],
)
def test_a_multilingual_tokenizer_needs_languages_that_it_knows(tmp_path, languages, message):
    with pytest.raises(UsageError, match=message):
        load_preparation(load_recipe(str(write_multilingual_run(tmp_path, "mbart", *languages))).recipe)


def test_another_tokenizer_has_no_languages(tmp_path):
    recipe = write_seq2seq_run(tmp_path, task={"target_language": "ro_RO"})
    with pytest.raises(UsageError, match=r"`task.target_language` is 'ro_RO', but the tokenizer .* marks no language"):
        load_preparation(load_recipe(str(recipe)).recipe)


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
        **sgd_sections(learning_rate=0.1),
    )
    with tiny_training(recipe) as training:
        model: Any = AutoModelForSeq2SeqLM.from_config(training.model.config, attn_implementation="eager")
        losses_of_both(training, model, mean_of_batch(model), 0.1, abs=1e-5)
