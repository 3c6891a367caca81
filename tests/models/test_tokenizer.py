"""A tokenizer that cannot be the model's own is refused before anything is tokenised."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from tests.helpers.tiny_run import WORDS, write_tiny_run
from tests.helpers.training import TINY_BERT
from trainer.base.errors import UsageError
from trainer.models.tokenizer import load_tokenizer, tokenizer_notes
from trainer.recipe.schema import Model


@pytest.mark.parametrize("key", ["name_or_path", "tokenizer"])
@pytest.mark.parametrize("model_type", ["bert", "gpt2", "roberta", "t5"])
def test_a_folder_with_a_configuration_only_has_no_vocabulary(tmp_path, model_type, key):
    """transformers makes a tokenizer of special tokens for it, to which every word is unknown."""
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=rf"`model.{key}` is .*no vocabulary of a tokenizer.*`model.tokenizer`"):
        load_tokenizer(Model.model_validate({"name_or_path": "a/model", key: str(tmp_path)}))


def without_padding(folder: Path) -> Path:
    """A tokenizer with an end token and no padding token, as GPT-2 has it."""
    write_tiny_run(folder)
    file = folder / "tokenizer" / "tokenizer_config.json"
    described = json.loads(file.read_text())
    del described["pad_token"]
    file.write_text(json.dumps({**described, "eos_token": "[SEP]"}))
    return file.parent


def test_an_end_token_fills_rows_where_there_is_no_padding_token(tmp_path):
    recipe = Model(config=TINY_BERT, tokenizer=str(without_padding(tmp_path)))
    tokenizer = load_tokenizer(recipe)
    assert tokenizer.pad_token == "[SEP]"
    assert tokenizer_notes(recipe, tokenizer, None) == ["the end token '[SEP]' fills short rows, hidden from attention"]


class TestSize:
    @pytest.fixture
    def folder(self, tmp_path) -> str:
        write_tiny_run(tmp_path)
        return str(tmp_path / "tokenizer")

    def test_a_tenth_of_the_embedding_is_enough(self, folder):
        recipe = Model(name_or_path=folder)
        assert tokenizer_notes(recipe, load_tokenizer(recipe), 10 * (len(WORDS) + 5)) == []

    def test_far_less_is_refused(self, folder):
        recipe = Model(name_or_path=folder)
        with pytest.raises(UsageError, match=r"of 105 tokens for an embedding of 30,522; name the model's own"):
            tokenizer_notes(recipe, load_tokenizer(recipe), 30522)

    @pytest.mark.parametrize("keys", [{"config": TINY_BERT}, {"name_or_path": "a/model"}])
    def test_far_less_is_noted_where_the_recipe_names_the_tokenizer(self, folder, keys):
        recipe = Model.model_validate({**keys, "tokenizer": folder})
        (note,) = tokenizer_notes(recipe, load_tokenizer(recipe), 30522)
        assert note == "the tokenizer has 105 tokens, the model's embedding 30,522"
