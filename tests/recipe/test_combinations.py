"""The table of keys that exclude each other: every row is refused, documented, and no wider than its words."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from docs.generate import with_blocks
from trainer.base.errors import RecipeError
from trainer.base.extensions import registered
from trainer.recipe.combinations import EXCLUSIONS, Condition, Exclusion
from trainer.recipe.reading.keys import known_keys
from trainer.recipe.reading.loading import load_recipe
from trainer.recipe.schedules import SCHEDULES
from trainer.recipe.schema import Recipe
from trainer.recipe.strategies import STRATEGIES

_WORDS: dict[str, list[Any]] = {
    "above 1": [2, 3],
    "a number": [2],
    "a share": [0.5],
    "other than adamw": ["sgd", "muon", "adamw_8bit"],
    "other than constant": ["linear", "cosine", "cosine_with_restarts", "warmup_stable_decay"],
    "any keys": [{"steps_per_print": 1}],
}


def values_of(condition: Condition) -> list[Any]:
    """Return the values that the words of a condition describe."""
    return _WORDS.get(condition.values) or [json.loads(text) for text in re.findall(r"`([^`]+)`", condition.values)]


def pairs() -> Iterator[Any]:
    for row in EXCLUSIONS:
        for value in values_of(row.first):
            for other in values_of(row.second):
                name = f"{row.first.key}={json.dumps(value)} {row.second.key}={json.dumps(other)}"
                yield pytest.param(row, value, other, id=name)


def override(key: str, value: Any) -> str:
    return f"{key}={json.dumps(value)}"


def needed(*keys: str) -> list[str]:
    """Return the overrides that these keys require."""
    return ["parallel.pipeline.stages=2"] if any(key.startswith("parallel.pipeline.s") for key in keys) else []


@pytest.mark.parametrize(("row", "value", "other"), list(pairs()))
def test_every_pair_is_refused_at_its_first_key(row: Exclusion, value: Any, other: Any):
    keys = [*needed(row.first.key, row.second.key), override(row.first.key, value), override(row.second.key, other)]
    has_vocabulary = row.first.key == "task.logits_chunk"
    with pytest.raises(RecipeError) as caught:
        load_recipe("bert_sample_mlm" if has_vocabulary else "bert_base_mrpc", keys)
    (problem,) = [text for text in caught.value.problems if f"`{row.first.key}` " in text and row.remedy in text]
    assert f"`{row.second.key}`" in problem
    assert "{" not in problem.replace(json.dumps(value), "")


@pytest.mark.parametrize("row", EXCLUSIONS, ids=lambda row: f"{row.first.key} {row.second.key}")
def test_each_condition_is_that_of_a_key_of_the_recipe(row: Exclusion):
    recipe = load_recipe("bert_base_mrpc").recipe
    sections = {name: getattr(recipe, name) for name in Recipe.model_fields}
    assert not (row.first.holds(row.first.value(sections)) and row.second.holds(row.second.value(sections)))
    assert row.message(sections) is None
    assert row.reason
    assert row.remedy


def test_every_key_of_a_registration_is_a_key_of_the_recipe():
    """A key that no folder registers counts as null, since folders may be deleted: a misspelt one would do nothing."""
    kinds = ("variant", "update", "model", "second_model", "tier", "source", "rows", "card", "head", "axis", "elastic")
    keys = {row.name for kind in kinds for row in registered(kind)}
    keys |= {condition.key for row in EXCLUSIONS for condition in (row.first, row.second)}
    keys |= {section for row in registered("rule") for section in row.name.split()}
    assert keys - {*known_keys()} == set()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("parallel.tensor", 2, "no_tensor"),
        ("parallel.pipeline.stages", 2, "no_pipeline"),
        ("compile", True, "no_compile"),
        ("parallel.load", "broadcast", "no_broadcast"),
    ],
)
def test_strategies_without_a_reason_combine(strategy: str, key: str, value: object, allowed: str):
    keys = [override("parallel.strategy", strategy), override(key, value)]
    if reason := getattr(STRATEGIES[strategy], allowed):
        with pytest.raises(
            RecipeError,
            match=re.escape(
                f"`{key}` is {json.dumps(value)}, which does not combine with `parallel.strategy` {strategy}: {reason};"
            ),
        ):
            load_recipe("bert_base_mrpc", keys)
    else:
        load_recipe("bert_base_mrpc", keys)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_only_a_split_backward_pass_refuses_selective_checkpointing(schedule: str, checkpointing: str):
    keys = [
        "parallel.pipeline.stages=2",
        override("parallel.pipeline.schedule", schedule),
        override("activation_checkpointing", checkpointing),
    ]
    if SCHEDULES[schedule].splits_backward and checkpointing == "selective":
        with pytest.raises(RecipeError, match=r"does not combine with `parallel\.pipeline\.schedule` zero_bubble: "):
            load_recipe("bert_base_mrpc", keys)
    else:
        load_recipe("bert_base_mrpc", keys)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            ["parallel.sequence=true"],
            "`parallel.sequence` is true, but `parallel.tensor` is 1: sequence parallelism shards positions over tensor"
            " ranks; set `parallel.tensor` above 1, or leave it false",
        ),
        (
            ["parallel.tensor=2", "training.layout_invariant_dropout=false"],
            "`parallel.tensor` is 2, which needs `training.layout_invariant_dropout`: torch's own dropout would draw"
            " the same mask on every tensor rank; leave it true",
        ),
        (
            ["parallel.pipeline.stages=2", "parallel.strategy=fsdp", "parallel.offload=parameters"],
            '`parallel.offload` is "parameters", which does not combine with `parallel.pipeline.stages` 2: the'
            ' combination is not tested; set it to "none"',
        ),
        (
            ["parallel.pipeline.stages=2", "parallel.pipeline.stages_per_rank=2"],
            "`parallel.pipeline.stages_per_rank` must be 1 for `parallel.pipeline.schedule` 1f1b, but is 2; remove it,"
            " or use interleaved_1f1b or zero_bubble",
        ),
        (
            ["parallel.reshard_after_forward=false"],
            "`parallel.reshard_after_forward` applies only to fsdp and hsdp, but `parallel.strategy` is ddp; remove"
            " it, or use fsdp or hsdp",
        ),
    ],
)
def test_messages(keys: list[str], message: str):
    with pytest.raises(RecipeError) as caught:
        load_recipe("bert_base_mrpc", keys)
    assert list(caught.value.problems) == [f"command line: {message}"]


def test_the_documentation_prints_every_row():
    block = with_blocks("<!-- generated: exclusions -->\n<!-- end -->")
    assert block.count("; ") + block.count("\n- `") == len(EXCLUSIONS)
