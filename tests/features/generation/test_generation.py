"""The generation configuration: the recipe replaces the search of a checkpoint, the tokenizer its special tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from trainer.base.errors import UsageError
from trainer.features.generation import generation
from trainer.features.generation.generation import set_generation
from trainer.features.generation.section import Generation

TOKENIZER = SimpleNamespace(bos_token_id=None, pad_token_id=3, added_tokens_decoder=dict.fromkeys(range(8)))
STAYS = {
    "bad_words_ids": [[3]],
    "begin_suppress_tokens": [4],
    "encoder_repetition_penalty": 1.5,
    "no_repeat_ngram_size": 3,
    "repetition_penalty": 1.2,
    "sequence_bias": {(5,): -2.0},
    "suppress_tokens": [6],
    "cache_implementation": "dynamic",
    "own_setting_of_a_model": 7,
}
GOES = {
    "num_beams": 4,
    "max_length": 142,
    "min_length": 56,
    "length_penalty": 2.0,
    "early_stopping": True,
    "top_p": 0.9,
}


def model_with(**settings: Any) -> Any:
    sizes = {"vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = AutoConfig.for_model("llama", **sizes, intermediate_size=8)
    model = AutoModelForCausalLM.from_config(config)
    if settings:
        model.generation_config = GenerationConfig(**settings)
    return model


def found_in(model: Any, *ends: int, **settings: Any) -> dict[str, Any]:
    set_generation(model, Generation(**settings) if settings else None, TOKENIZER, ends, {})
    return model.generation_config.to_diff_dict()


KEPT = frozenset(
    ("bad_words_ids", "begin_suppress_tokens", "bos_token_id", "decoder_start_token_id",
     "encoder_no_repeat_ngram_size", "encoder_repetition_penalty", "eos_token_id", "forced_bos_token_id",
     "forced_eos_token_id", "guidance_scale", "no_repeat_ngram_size", "pad_token_id", "remove_invalid_values",
     "renormalize_logits", "repetition_penalty", "sequence_bias", "stop_strings", "suppress_tokens",
     "watermarking_config")
)  # fmt: skip
"""Settings of the tokens that a text may have, which stay; so do settings of a model's own class."""


def test_each_setting_of_transformers_is_known():
    tables = (generation._REPLACED, generation._OF_CACHES, KEPT, frozenset(generation._REFUSED))
    known = vars(GenerationConfig()).keys() - {"_from_model_config", "transformers_version"}
    assert sorted(name for table in tables for name in table) == sorted(known)


def test_the_recipe_replaces_the_search_and_keeps_the_tokens_that_a_text_may_have():
    found = found_in(model_with(**STAYS, **GOES, eos_token_id=2), 2, max_new_tokens=5)
    assert STAYS.items() <= found.items()
    assert found.keys() - STAYS.keys() >= {"max_new_tokens", "num_beams", "do_sample"}
    assert (found["num_beams"], found["max_new_tokens"]) == (1, 5)
    assert not found.keys() & (GOES.keys() - {"num_beams"})
    assert found_in(model_with(**STAYS), 2, max_new_tokens=5, no_repeat_ngram_size=0)["no_repeat_ngram_size"] == 0


def test_without_settings_the_search_of_the_model_stays():
    assert GOES.items() <= found_in(model_with(**GOES), 2).items()


@pytest.mark.parametrize(
    ("own", "ends", "expected"),
    [
        ({}, (0,), 0),  # llama's default is 2
        ({}, (0, 4), [0, 4]),
        ({"eos_token_id": [1, 5, 9]}, (0, 4), [0, 4, 1, 5]),  # 9 is an ordinary token
        ({"eos_token_id": 5, "_from_model_config": True}, (0,), 0),
        ({"eos_token_id": 5}, (), 5),
    ],
)
def test_a_text_ends_at_end_tokens_of_tokenizer_and_checkpoint(own, ends, expected):
    model = model_with(**own)
    found = found_in(model, *ends)
    assert (found["eos_token_id"], found["pad_token_id"]) == (expected, 3)
    assert model.config.eos_token_id == (ends[0] if ends else 2)


@pytest.mark.parametrize(
    ("own", "expected"),
    [({}, None), ({"bos_token_id": 4, "eos_token_id": 5}, 4)],  # llama's default is 1
)
def test_a_tokenizer_without_a_start_token_replaces_that_of_the_class(own, expected):
    model = model_with(**own)
    assert found_in(model, 2).get("bos_token_id") == model.config.bos_token_id == expected


@pytest.mark.parametrize(("ends", "expected"), [((2, 4), 2), ((4,), 4)])
def test_the_forced_end_is_one_that_ends_a_text(ends, expected):
    assert found_in(model_with(forced_eos_token_id=2), *ends)["forced_eos_token_id"] == expected


def test_a_setting_that_needs_more_than_the_folder_is_refused():
    with pytest.raises(UsageError, match=r"`token_healing` in the `generation_config.json` .* remove it from a copy"):
        found_in(model_with(token_healing=True), 2, max_new_tokens=5)
    assert found_in(model_with(token_healing=True), 2)["token_healing"]
