"""Parity of tasks: every task gives the same training under every layout as on one process.

A new task needs its row in `TINY_TASKS` of `tests/helpers/training.py` and its name in `TASKS`; those of features have
tests of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from tests.helpers.ranks import RankPools
from tests.helpers.training import TINY_TASKS, Curve, sgd_sections, tiny_recipe, train_tiny
from tests.helpers.turns import once
from tests.parity.cases import FEW_ROWS, FEW_STEPS, TOLERANCES, assert_same_curve, largest_difference
from trainer.recipe.schema import Recipe

TASKS = (
    "sequence_regression",
    "masked_lm",
    "causal_lm",
    "causal_lm_packed",
    "weighted_classification",
)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"parallel": {"strategy": "ddp"}}),
    "fsdp-accumulated": (3, {"parallel": {"strategy": "fsdp"}, "training": {"micro_batch_size": 1}}),
    "zero3-tensor": (4, {"parallel": {"strategy": "zero3", "tensor": 2}}),
    "tensor-sequence-accumulated": (
        2,
        {
            "parallel": {"strategy": "ddp", "tensor": 2, "sequence": True},
            "training": {"micro_batch_size": 4},
            "activation_checkpointing": "full",
        },
    ),
    "context": (2, {"parallel": {"strategy": "ddp", "context": 2}}),
    "ring": (3, {"parallel": {"strategy": "ddp", "context": 3}, "training": {"micro_batch_size": 5}}),
    "pipeline": (2, {"parallel": {"strategy": "ddp", "pipeline": {"stages": 2}}}),
    "tensor-context": (4, {"parallel": {"strategy": "ddp", "tensor": 2, "context": 2}}),
    "fsdp-tensor-pipeline": (
        8,
        {"parallel": {"strategy": "fsdp", "tensor": 2, "pipeline": {"stages": 2}}, "training": {"micro_batch_size": 2}},
    ),
}

VARIANTS = (
    "weighted_classification",
    "sequence_regression",
)
"""Tasks that differ from another one by a key or a family."""
CHUNKED = ("masked_lm", "causal_lm_packed", "seq2seq_lm")
"""Tasks with a loss in chunks of tokens; their reference is torch's loss of whole logits, as that of `causal_lm`."""
CUTS = ("fsdp-accumulated", "tensor-sequence-accumulated", "context", "pipeline")
FURTHER = {
    **dict.fromkeys(VARIANTS, CUTS[:1]),
    "causal_lm": (*CUTS, "zero3-tensor", "tensor-context", "fsdp-tensor-pipeline"),
    "masked_lm": ("tensor-sequence-accumulated", "context"),
    "causal_lm_packed": ("fsdp-accumulated",),
}
"""Layouts in which `make test-all` trains a task, where its labels or its rows are cut in another way than others'."""


def marks_of(layout: str, quick: Sequence[str], slow: Sequence[str]) -> tuple[pytest.MarkDecorator, ...]:
    """Return the marks of a layout, for those of a task in `make test` and in `make test-all`."""
    if layout in quick:
        return ()
    return (pytest.mark.slow if layout in slow else pytest.mark.nightly,)


def _quick(task: str) -> tuple[str, ...]:
    """Return the layouts in which `make test` trains a task: each kind of label in one, each layout with a task."""
    if task in VARIANTS:
        return ()
    if task == "causal_lm_packed":
        return ("ring",)
    return (CUTS[TASKS.index(task) % len(CUTS)],)


def recipe_of(task: str, sgd: bool = False, training: dict[str, Any] | None = None, **keys: Any) -> Recipe:
    """Return a recipe with dropout 0.1, of `FEW_STEPS` steps of AdamW or of one step of gradient descent."""
    tiny = TINY_TASKS[task]
    chunk = {"logits_chunk": 7} if task in CHUNKED and "distillation" not in keys else {}
    sections = {
        "task": {**tiny.keys, **chunk, **keys.pop("task_keys", {})},
        "model": {**tiny.model, "dropout": 0.1},
        **keys,
    }
    steps: dict[str, Any] = {"max_steps": 1, "max_grad_norm": None} if sgd else {"max_steps": FEW_STEPS}
    return tiny_recipe(**sections, **(sgd_sections() if sgd else {}), training={**steps, **(training or {})})


def train(task: str, keys: dict[str, Any]) -> tuple[Curve, Curve]:
    """Train on this rank: steps of AdamW, and one step of gradient descent, which shows the gradient's scale."""
    recipes = (recipe_of(task, sgd=sgd, **keys) for sgd in (False, True))
    curve, sgd = (train_tiny(recipe, num_rows=FEW_ROWS) for recipe in recipes)
    return curve, sgd


@cache
def reference(task: str) -> tuple[Curve, Curve]:
    keys = {"task_keys": {"logits_chunk": None}} if task in (*CHUNKED, "causal_lm") else {}
    return once(f"parity of the task {task}", lambda: train(task, keys))


def assert_same_training(found: tuple[Curve, Curve], expected: tuple[Curve, Curve]) -> None:
    """Compare the results of `train`: both curves, and the weights after gradient descent."""
    for curve, expected_curve in zip(found, expected, strict=True):
        assert_same_curve(curve, expected_curve)
    assert largest_difference(found[1], expected[1]) <= TOLERANCES["fp32"].sgd_weights


def assert_accumulation_changes_nothing(task: str) -> None:
    found = train_tiny(recipe_of(task, training={"micro_batch_size": 5}), num_rows=FEW_ROWS)
    assert_same_curve(found, reference(task)[0])


def assert_layout_is_one_process(ranks: RankPools, task: str, layout: str) -> None:
    world_size, keys = LAYOUTS[layout]
    for found in ranks(world_size).run(train, task, keys):
        assert_same_training(found, reference(task))


@pytest.mark.parametrize(
    "task", [pytest.param(task, marks=pytest.mark.slow if task in VARIANTS else ()) for task in TASKS]
)
def test_accumulation_on_one_process_changes_nothing(task: str):
    assert_accumulation_changes_nothing(task)


@pytest.mark.parametrize(
    ("task", "layout"),
    [pytest.param(task, name, marks=marks_of(name, _quick(task), FURTHER[task])) for task in TASKS for name in LAYOUTS],
)
def test_any_layout_is_one_process(ranks: RankPools, task: str, layout: str):
    assert_layout_is_one_process(ranks, task, layout)


@pytest.mark.slow
def test_stages_of_tensor_and_context_ranks_are_one_process(ranks: RankPools):
    keys = {"parallel": {"tensor": 2, "context": 2, "pipeline": {"stages": 2}}}
    for found in ranks(8).run(train, "causal_lm", keys):
        assert_same_training(found, reference("causal_lm"))


@pytest.mark.nightly
@pytest.mark.parametrize("task", CHUNKED)
@pytest.mark.parametrize("parallel", [{"strategy": "zero1"}, {"strategy": "zero2"}, {"strategy": "hsdp", "shard": 1}])
def test_chunks_of_tokens_under_other_strategies(ranks: RankPools, task: str, parallel: dict[str, Any]):
    for found in ranks(2).run(train, task, {"parallel": parallel}):
        assert_same_training(found, reference(task))


@pytest.mark.nightly
@pytest.mark.parametrize("task", CHUNKED)
def test_chunks_of_tokens_in_bf16(task: str):
    whole = train(task, {"precision": "bf16", "task_keys": {"logits_chunk": None}})
    for curve, expected in zip(train(task, {"precision": "bf16"}), whole, strict=True):
        assert_same_curve(curve, expected, TOLERANCES["bf16"])
