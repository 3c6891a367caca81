from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from trainer.recipe.reading.files import read_file
from trainer.recipe.reading.keys import known_keys
from trainer.recipe.reading.loading import load_recipe
from trainer.recipe.reading.shipped import is_base, shipped_recipes
from trainer.recipe.schema import Interval, Recipe, file_schema
from trainer.recipe.strategies import STRATEGIES

VALIDATOR = jsonschema.Draft202012Validator(file_schema())


def test_the_schema_is_a_valid_json_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(file_schema())


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_files_and_their_resolved_forms_are_valid(name: str) -> None:
    path = shipped_recipes()[name]
    VALIDATOR.validate(read_file(path)[0].plain())
    if not is_base(path):
        VALIDATOR.validate(load_recipe(name, is_whole=True).recipe.model_dump(mode="json"))


@pytest.mark.parametrize(
    "recipe",
    [
        {"trainng": {}},
        {"training": {"epochs": "3"}},
        {"training": {"epochs": 0}},
        {"evaluation": {"every": "5 stps"}},
        {"data": {"source": "hub", "path": "x"}},
        {"optimizer": {"momentum": 0.9, "beta2_decay": -0.8}},
        {"extends": 3},
        {"name": "a b"},
    ],
)
def test_editors_see_mistakes(recipe: dict[str, Any]) -> None:
    assert not VALIDATOR.is_valid(recipe)


@pytest.mark.parametrize(
    "recipe",
    [
        {"$schema": "recipe.schema.json", "extends": "bert_base"},
        {"extends": "bert_base", "data": {"max_length": 64}},
        {"optimizer": {"learning_rate": 1}},
        {"evaluation": {"every": None}},
    ],
)
def test_editors_accept_a_part_of_a_recipe(recipe: dict[str, Any]) -> None:
    VALIDATOR.validate(recipe)


def test_every_key_explains_itself() -> None:
    definitions = file_schema()["$defs"]
    tags = {"type", "source"} | ({"name"} if "AdamW" in definitions else set())
    silent = [
        f"{section}.{key}"
        for section, schema in definitions.items()
        for key, field in schema["properties"].items()
        if "description" not in field and key not in tags
    ]
    assert silent == []
    assert all(schema.get("description") for schema in definitions.values())


def test_every_strategy_can_be_chosen() -> None:
    assert file_schema()["$defs"]["Parallel"]["properties"]["strategy"].get("enum", ["ddp"]) == list(STRATEGIES)
    assert "parallel.strategy" in known_keys()


@pytest.mark.parametrize("text", ["1 epoch", "2 epochs", "100 steps", "1 step"])
def test_intervals_read_back_as_written(text: str) -> None:
    recipe = load_recipe("bert_base_mrpc", [f"checkpoint.every={text}"]).recipe
    assert str(recipe.checkpoint.every) == text
    assert isinstance(recipe.checkpoint.every, Interval)


def test_only_texts_that_name_nothing_may_be_blank():
    found = set()

    def walk(part: Any, key: str) -> None:
        if isinstance(part, list):
            for inner in part:
                walk(inner, key)
        elif isinstance(part, dict):
            if part.get("type") == "string" and not {"pattern", "enum", "const"} & part.keys():
                found.add(key)
            for name, inner in part.items():
                walk(inner, key if name in ("anyOf", "items", "additionalProperties") else name)

    walk(Recipe.model_json_schema(), "")
    assert found == {
        "delimiter", "document_prompt", "new_tokens", "prefix", "query_prompt", "question_texts", "trainable_tokens",
        "values",
    }  # fmt: skip
