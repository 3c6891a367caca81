from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from transformers import AutoConfig

from tests.helpers.seq2seq import tiny_tokenizer
from tests.helpers.tiny_run import write_tiny_run
from tests.helpers.training import TINY_BERT, TINY_T5
from trainer.base.errors import DataError, UsageError
from trainer.data.sources import load_splits
from trainer.features.masked_lm.masking import Masking
from trainer.features.masked_lm.section import MaskedLM
from trainer.recipe.plan import plan_run
from trainer.recipe.reading.loading import load_recipe
from trainer.tasks.registry import build_task
from trainer.tools.check import check_local_parts
from trainer.training.data_notes import encoding_notes
from trainer.training.row_encoding import (
    TextPreparation,
    load_preparation,
    resolve_task,
)

MASKED_LM = {"type": "masked_lm", "text": "text", "metrics": ["accuracy"]}


def test_texts_are_prepared_by_the_tokenizer(tmp_path):
    recipe = load_recipe(str(write_tiny_run(tmp_path))).recipe
    preparation = load_preparation(recipe)
    assert isinstance(preparation, TextPreparation)
    assert (preparation.max_length, preparation.normalisation) == (16, None)
    assert preparation.masking(build_task(recipe.task), 0) is None, "prepared rows have labels"
    preparation.save(tmp_path / "model")
    assert (tmp_path / "model" / "tokenizer.json").exists()


def test_a_full_disk_is_an_error_of_the_system(tmp_path):
    """The package of the tokenizer raises a plain `Exception`."""
    preparation = load_preparation(load_recipe(str(write_tiny_run(tmp_path))).recipe)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        preparation.save(tmp_path / "model")


def test_tokens_are_hidden_by_the_tokenizers_mask(tmp_path):
    recipe = load_recipe(str(write_tiny_run(tmp_path, task=MASKED_LM))).recipe
    preparation = load_preparation(recipe)
    masking = preparation.masking(build_task(recipe.task), 7)
    assert isinstance(masking, Masking)
    assert (masking.mask_token, masking.seed) == (preparation.tokenizer.mask_token_id, 7)


class TestATokenWithoutAnEmbedding:
    @pytest.fixture
    def preparation(self, tmp_path):
        """Of a model with 50 tokens, and a tokenizer with 105; the rows have words of both halves."""
        recipe = write_tiny_run(tmp_path, model={"config": {**TINY_BERT, "vocab_size": 50}})
        rows = [{"text": "word1 word44", "label": "a"}, {"text": "word1 word45", "label": "b"}]
        (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return load_preparation(load_recipe(str(recipe)).recipe)

    def encode(self, preparation, folder, *rows):
        recipe = load_recipe(str(folder / "recipe.json")).recipe
        split = load_splits(recipe.data).train
        task = build_task(recipe.task).resolve(split.rows, split.where)
        return preparation.encode(replace(split, rows=split.rows.select(rows)), task, folder / "cache")

    def test_in_the_rows(self, preparation, tmp_path):
        assert len(self.encode(preparation, tmp_path, 0)) == 1
        with pytest.raises(UsageError, match=r"has the token 'word45' of id 50, but the model's `vocab_size` is 50"):
            self.encode(preparation, tmp_path, 1)

    def test_that_may_be_put_in(self, preparation):
        with pytest.raises(UsageError, match="'word99' of id 104"):
            preparation.masking(build_task(MaskedLM(**MASKED_LM)), 7)

    def test_that_fills_rows(self, preparation):
        assert preparation.batching.token_id == 0
        preparation.tokenizer.pad_token = "word60"
        with pytest.raises(UsageError, match="'word60' of id 65"):
            _ = preparation.batching


class TestT5Classifies:
    """The state at the end token is that of the text, so every row needs as many of them."""

    def encode(self, folder, texts, tokenizer=None):
        recipe = write_tiny_run(folder, model={"config": TINY_T5})
        if tokenizer:
            tokenizer.save_pretrained(folder / "tokenizer")
        rows = [{"text": text, "label": "ab"[index % 2]} for index, text in enumerate(texts)]
        (folder / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        recipe = load_recipe(str(recipe)).recipe
        preparation, split = load_preparation(recipe), load_splits(recipe.data).train
        task, _ = resolve_task(build_task(recipe.task), preparation, split)
        return preparation.encode(split, task, folder / "cache")

    def test_texts_with_an_end_token(self, tmp_path):
        encoded = self.encode(tmp_path, ["word1", "word2 word3"], tiny_tokenizer())
        assert encoded.tokens["input_ids"].tolist() == [4, 1, 5, 6, 1]

    def test_a_tokenizer_without_an_end_token_is_refused(self, tmp_path):
        message = (
            r"type t5, which reads the end token of id 1, but the tokenizer .* adds none to row 1 of .*train.jsonl"
        )
        with pytest.raises(UsageError, match=message):
            self.encode(tmp_path, ["word1", "word2 word3"], tiny_tokenizer(adds_end=False))

    def test_a_text_that_holds_the_end_token_is_refused(self, tmp_path):
        message = r"row 2 of .*train.jsonl` must have 1 end tokens, as other rows do, but has 2; remove '</s>'"
        with pytest.raises(DataError, match=message):
            self.encode(tmp_path, ["word1", "word2 </s> word3", "word4"], tiny_tokenizer())

    def test_a_decoder_without_a_start_token_starts_with_padding(self, tmp_path):
        recipe = load_recipe(str(write_tiny_run(tmp_path, model={"config": TINY_T5}))).recipe
        assert load_preparation(recipe).config.decoder_start_token_id == 0


SIZES = {
    "vocab_size": 120, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 16, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TEXTS = {"type": "causal_lm", "text": "text", "metrics": ["perplexity"]}
ROUTED = {"num_local_experts": 2, "num_experts_per_tok": 1, "output_router_logits": True, "router_aux_loss_coef": 0.5}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 10000.0}


class TestADecoder:
    def recipe(self, folder, model_type, task=TEXTS, max_length=16, **keys):
        model = {"config": {"model_type": model_type, **SIZES, **keys}}
        return load_recipe(str(write_tiny_run(folder, model=model, task=task, data={"max_length": max_length}))).recipe

    def test_with_a_loss_of_its_routers_is_refused(self, tmp_path):
        recipe = self.recipe(tmp_path, "mixtral", **ROUTED)
        with pytest.raises(
            UsageError,
            match=r"`router_aux_loss_coef` .* is 0.5 .* set .*`model.config.output_router_logits` .*`task.router_loss`",
        ):
            load_preparation(recipe)
        plan = plan_run(recipe, 1)
        assert any("`router_aux_loss_coef`" in problem for problem in check_local_parts(plan).problems.messages)
        load_preparation(self.recipe(tmp_path, "mixtral", **{**ROUTED, "router_aux_loss_coef": 0.0}))
        classes = {"type": "sequence_classification", "text": "text", "metrics": ["accuracy"]}
        load_preparation(self.recipe(tmp_path, "mixtral", classes, **ROUTED))  # this head adds no such loss

    @pytest.mark.parametrize(
        ("model_type", "keys"),
        [
            ("phi3", {"original_max_position_embeddings": 16, "rope_parameters": LONG}),
            ("llama", {"max_position_embeddings": 16, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}),
        ],
    )
    def test_with_rotations_that_depend_on_the_length_takes_rows_of_the_original_length(
        self, tmp_path, model_type, keys
    ):
        load_preparation(self.recipe(tmp_path, model_type, **keys))
        recipe = self.recipe(tmp_path, model_type, max_length=17, **keys)
        with pytest.raises(UsageError, match=r"rows of more than 16 tokens .*, but `data.max_length` allows 17"):
            load_preparation(recipe)

    def test_has_a_note_on_rows_beyond_its_positions(self, tmp_path):
        recipe = self.recipe(tmp_path, "llama", max_position_embeddings=8)
        notes = check_local_parts(plan_run(recipe, 1)).notes
        assert any(
            re.match(r"training rows have up to \d+ tokens, more than the 8 positions", note) for note in notes
        ), notes
        recipe = self.recipe(tmp_path, "llama", max_position_embeddings=16)
        assert not any("positions" in note for note in check_local_parts(plan_run(recipe, 1)).notes)


class TestAFineTunedCheckpoint:
    def test_gives_the_order_of_the_classes_and_a_note(self, tmp_path):
        AutoConfig.for_model(**TINY_BERT, id2label={0: "c", 1: "a", 2: "b"}).save_pretrained(tmp_path / "tokenizer")
        model = {"config": None, "tokenizer": None, "name_or_path": str(tmp_path / "tokenizer")}
        recipe = load_recipe(str(write_tiny_run(tmp_path, model=model))).recipe
        preparation = load_preparation(recipe)
        train = load_splits(recipe.data).train
        task, notes = resolve_task(build_task(recipe.task), preparation, train)
        assert task.model_options()["id2label"] == {0: "c", 1: "a", 2: "b"}
        assert notes == ["classes are in the order of the checkpoint: c, a, b"]


def test_the_share_of_unknown_tokens_is_always_noted(tmp_path):
    recipe = load_recipe(str(write_tiny_run(tmp_path))).recipe
    preparation = load_preparation(recipe)
    train = load_splits(recipe.data).train
    encoded = preparation.encode(train, build_task(recipe.task).resolve(train.rows, train.where), tmp_path / "cache")
    (note,) = encoding_notes({"training": encoded}, 16, "rows", "")
    assert re.fullmatch(r"unknown to the tokenizer: 0.00% of \d+ training tokens", note)
