"""Trained rows of tokens: their gradients, against those of whole weights, and their errors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.helpers.families import CONFIGS
from tests.helpers.training import TINY_BERT
from trainer.base.errors import UsageError
from trainer.features.chunked_head.head import why_whole
from trainer.models import adapters
from trainer.models.freezing import adapt
from trainer.recipe.schema import Model

# Embeddings with a factor: a buffer, which a model on `meta` does not have, or a number.
SCALED = {
    "gemma2": {"head_dim": 8, "pad_token_id": 0},
    "mbart": {"scale_embedding": True, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "decoder_ffn_dim": 8},
}


@pytest.mark.parametrize(("kind", "tied"), [("llama", True), ("llama", False), ("gemma2", True), ("mbart", True)])
def test_trained_rows_have_the_gradients_of_whole_weights(kind: str, tied: bool):
    described = CONFIGS["llama"] if kind != "mbart" else {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    described = {**described, **SCALED.get(kind, {}), "vocab_size": 40, "tie_word_embeddings": tied}
    torch.manual_seed(0)
    whole = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **described)).eval()
    model, ids = copy.deepcopy(whole), [3, 17, 18]
    adapter = {"type": "lora", "trainable_tokens": ids[::-1], "targets": ["q_proj"]}
    recipe = Model.model_validate({"config": {"model_type": kind}, "tokenizer": "none", "adapter": adapter})
    adapt(copy.deepcopy(whole).to("meta"), recipe, 0)
    adapt(model, recipe, 0)
    if kind == "llama":
        assert why_whole(model) == "an adapter changes the logits of its head"
    tokens = torch.tensor([[1, 3, 18, 5, 3, 0], [17, 2, 9, 18, 39, 4]])
    losses = [one(input_ids=tokens, labels=tokens).loss for one in (whole, model)]
    assert losses[1].item() == losses[0].item()
    for loss in losses:
        loss.backward()
    expected = whole.get_input_embeddings().weight.grad, whole.lm_head.weight.grad
    found = model.get_input_embeddings().trained_rows.rows.grad, model.lm_head.trained_rows.rows.grad
    for rows, weight in zip(found, expected, strict=True):
        assert (rows - weight[ids]).abs().max() < 1e-6 * weight.abs().max()
    assert (found[0] is found[1]) == tied
    with torch.no_grad():  # the layers use the rows, and not those of the frozen weights
        for layer in (model.get_input_embeddings(), model.lm_head):
            layer.weight[ids] = 7.0
        torch.testing.assert_close(model(input_ids=tokens).logits, whole(input_ids=tokens).logits)


def adapted(**keys: Any) -> None:
    described = {key: value for key, value in TINY_BERT.items() if key != "model_type"}
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model("bert", **described))
    adapt(model, Model.model_validate({"config": TINY_BERT, "tokenizer": "none", **keys}), seed=0)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"trainable_tokens": [3, 4000]}, r"a row in the embedding, which has 211 rows"),
        (
            {"trainable_tokens": [3], "modules_to_save": ["word_embeddings"]},
            r"`model.adapter.trainable_tokens` .*word_embeddings is trained whole",
        ),
    ],
)
def test_tokens_without_a_frozen_row_are_refused(keys: dict[str, Any], words: str):
    with pytest.raises(UsageError, match=words):
        adapted(adapter={"type": "lora", **keys})


def test_new_tokens_need_the_whole_embedding_without_this_feature(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(adapters, "all_of", lambda kind: {})
    with pytest.raises(UsageError, match=r"`model.adapter.modules_to_save` must name the embedding"):
        adapted(adapter={"type": "lora"}, new_tokens=["<new>"])
    adapted(adapter={"type": "lora", "modules_to_save": ["word_embeddings"]}, new_tokens=["<new>"])
