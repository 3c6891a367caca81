"""Whatever a user writes, loading gives a recipe or a `RecipeError`, never another exception."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.recipes import write_anew
from trainer.base.errors import RecipeError
from trainer.recipe.plan import plan_run
from trainer.recipe.reading.keys import known_keys
from trainer.recipe.reading.loading import load_recipe
from trainer.recipe.reading.shipped import shipped_recipes
from trainer.recipe.schema import Recipe

QUICK = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(10**98), max_value=10**98)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["1 epoch", "5 steps", "hub", "files", "folder", "sgd", "adamw", "runs/{name}", "~", "/", "\0"])
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from([*known_keys(), "extends", "$schema", "optimizer.params.lr", "zero_optimization.stage"])


@pytest.fixture(scope="module", autouse=True)
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.chdir(name)
        yield Path(name)


def loads_or_is_refused(content: bytes, overrides: list[str] | None = None) -> None:
    write_anew(Path("fuzzed.json"), content)
    try:
        resolved = load_recipe("fuzzed.json", overrides or ())
    except RecipeError as error:
        problems = error.problems
    else:
        problems = ()
        assert Recipe.model_validate(resolved.recipe.model_dump(mode="json")) == resolved.recipe
        plan_run(resolved.recipe, 1)
    assert all(problem and problem.isprintable() for problem in problems)


def complete(name: str) -> dict[str, Any]:
    """A shipped recipe with every key written, so that a mutation of any key finds it."""
    return load_recipe(name).recipe.model_dump(mode="json")


def put(recipe: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        if not isinstance(recipe.get(section), dict):
            recipe[section] = {}
        recipe = recipe[section]
    recipe[name] = value


@QUICK
@given(
    name=st.sampled_from(["bert_base_mrpc", "bert_base_sst2"]),
    changes=st.lists(st.tuples(KEYS, VALUES), min_size=1, max_size=4),
    removed=st.lists(st.sampled_from(known_keys()), max_size=2),
)
def test_mutations_of_a_valid_recipe(name: str, changes: list[tuple[str, Any]], removed: list[str]) -> None:
    recipe = copy.deepcopy(complete(name))
    for key, value in changes:
        put(recipe, key, value)
    for key in removed:
        section, _, last = key.rpartition(".")
        holder = recipe.get(section) if section else recipe
        if isinstance(holder, dict):
            holder.pop(last, None)
    loads_or_is_refused(json.dumps(recipe).encode())


@QUICK
@given(changes=st.lists(st.tuples(KEYS, VALUES), min_size=1, max_size=4))
def test_random_overrides(changes: list[tuple[str, Any]]) -> None:
    loads_or_is_refused(b'{"extends": "bert_base_mrpc"}', [f"{key}={json.dumps(value)}" for key, value in changes])


@QUICK
@given(overrides=st.lists(st.text(max_size=12) | st.from_regex(r"[a-z.\-]{0,8}=.{0,8}"), min_size=1, max_size=4))
def test_random_arguments(overrides: list[str]) -> None:
    loads_or_is_refused(b'{"extends": "bert_base_mrpc"}', overrides)


@QUICK
@given(value=VALUES)
def test_random_json(value: Any) -> None:
    loads_or_is_refused(json.dumps(value).encode())


@QUICK
@given(text=st.text(alphabet='{}[]",:/*\\ \n\tab01.-+eENtrufalsI\u0000\u00e9\ud800', max_size=40))
def test_random_text(text: str) -> None:
    loads_or_is_refused(text.encode("utf-8", "surrogatepass"))


@QUICK
@given(content=st.binary(max_size=60))
def test_random_bytes(content: bytes) -> None:
    loads_or_is_refused(content)


@QUICK
@given(data=st.data())
def test_a_shipped_file_with_a_few_characters_changed(data: st.DataObject) -> None:
    content = bytearray(shipped_recipes()["bert_base_mrpc"].read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(content) - 1))
        content[position : position + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    loads_or_is_refused(bytes(content))
