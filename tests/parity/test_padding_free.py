"""Parity of `data.padding_free`, `data.pad_to` and `training.micro_batch_tokens`: equal to that of padded rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.helpers.families import EXPERTS, NEAR_FAMILIES, has_head
from tests.helpers.ranks import RankPools
from tests.helpers.training import (
    NUM_CLASSES,
    NUM_SPECIAL,
    TINY_TASKS,
    VOCABULARY,
    sgd_sections,
    tiny_recipe,
    tiny_training,
    train_tiny,
)
from tests.parity.cases import TOLERANCES, assert_same_curve, largest_difference, model_config, reference
from tests.parity.test_tasks import assert_same_training
from tests.parity.test_tasks import reference as reference_of_task
from tests.parity.test_tasks import train as train_task
from trainer.data.split import EncodedSplit
from trainer.models.families.table import FAMILIES, layers_of

FLAT = {"data": {"padding_free": True}}
WIDE = {"data": {"pad_to": 16}}  # of at most 32 positions
BY_TOKENS = {"training": {"micro_batch_size": None, "micro_batch_tokens": 90}}
STEPS = 6
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp-accumulated": (2, {**FLAT, "training": {"micro_batch_size": 2}}),
    "ddp-tokens-padded": (2, {**BY_TOKENS}),
    "sequence-widths": (2, {**WIDE, "training": {"micro_batch_size": 2}, "parallel": {"tensor": 2, "sequence": True}}),
    "stages-widths": (2, {**WIDE, "parallel": {"pipeline": {"stages": 2}}}),
    "fsdp-tokens": (3, {**FLAT, **BY_TOKENS, "parallel": {"strategy": "fsdp"}}),
    "hsdp-tokens": (2, {**FLAT, **BY_TOKENS, "parallel": {"strategy": "hsdp", "shard": 1}}),
    "zero2": (2, {**FLAT, "parallel": {"strategy": "zero2"}}),
    "zero3-tokens": (2, {**FLAT, **BY_TOKENS, "parallel": {"strategy": "zero3"}}),
    "tensor-tokens": (2, {**FLAT, **BY_TOKENS, "parallel": {"tensor": 2}}),
    "sequence-recomputed": (
        2,
        {**FLAT, "parallel": {"tensor": 2, "sequence": True}, "activation_checkpointing": "full"},
    ),
    "context": (2, {**FLAT, "parallel": {"context": 2}, "activation_checkpointing": "selective"}),
    "fsdp-context-tokens": (4, {**FLAT, **BY_TOKENS, "parallel": {"strategy": "fsdp", "context": 2}}),
    "zero2-context": (4, {**FLAT, "parallel": {"strategy": "zero2", "context": 2}}),
    "zero3-context-tokens": (4, {**FLAT, **BY_TOKENS, "parallel": {"strategy": "zero3", "context": 2}}),
    "ring": (3, {**FLAT, "training": {"micro_batch_size": 3}, "parallel": {"context": 3}}),
    "hsdp-ring-recomputed": (
        6,
        {
            **FLAT,
            **BY_TOKENS,
            "parallel": {"strategy": "hsdp", "shard": 1, "context": 3},
            "activation_checkpointing": "full",
        },
    ),
}


def train(keys: dict[str, Any]) -> tuple[Any, Any]:
    """Train on this rank: steps of AdamW, and one step of gradient descent, which shows the gradient's scale."""
    keys = {"model": {"dropout": 0.1}, **keys}
    sgd = {**keys, **sgd_sections(), "training": {**keys.get("training", {}), "max_steps": 1, "max_grad_norm": None}}
    return train_tiny(tiny_recipe(**keys), num_steps=STEPS), train_tiny(tiny_recipe(**sgd))


FAST = ("ddp-accumulated", "tensor-tokens")
NIGHTLY = ("sequence-widths", "hsdp-tokens", "zero2", "context", "fsdp-context-tokens", "zero2-context")
NIGHTLY += ("zero3-context-tokens", "hsdp-ring-recomputed")


def _marks(layout: str) -> tuple[pytest.MarkDecorator, ...]:
    if layout in NIGHTLY:
        return (pytest.mark.nightly,)
    return () if layout in FAST else (pytest.mark.slow,)


@pytest.mark.parametrize("layout", [pytest.param(name, marks=_marks(name)) for name in LAYOUTS])
def test_any_layout_is_one_process_with_padding(ranks: RankPools, layout: str):
    world_size, keys = LAYOUTS[layout]
    expected = reference("fp32", 0.1)
    assert expected.sgd is not None
    for curve, sgd in ranks(world_size).run(train, keys):
        assert_same_curve(curve, expected.curve)
        assert largest_difference(sgd, expected.sgd) <= TOLERANCES["fp32"].sgd_weights


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.nightly)])
def test_16_bits_on_one_process(precision: str):
    recipe = tiny_recipe(model={"dropout": 0.1}, precision=precision, **FLAT)
    found = train_tiny(recipe, num_steps=3)
    assert_same_curve(found, reference(precision, 0.1).curve, TOLERANCES[precision])


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=pytest.mark.slow if name in (*NEAR_FAMILIES, *EXPERTS) else ())
        for name, family in FAMILIES.items()
        if family.padding_free and has_head(name, "AutoModelForSequenceClassification")
    ],
)
def test_every_family_without_padding(family: str):
    config = model_config(family)
    if family == "modernbert":  # local attention, and every dropout
        names = ("attention_dropout", "mlp_dropout", "embedding_dropout")
        config = {**config, "local_attention": 6, "initializer_range": 0.2, **dict.fromkeys(names, 0.1)}
    model = {"config": config, "dropout": None if family == "modernbert" else 0.1}
    expected, found = (train_tiny(tiny_recipe(model=model, **keys), num_steps=3) for keys in ({}, FLAT))
    assert_same_curve(found, expected)


def test_a_head_of_tokens():
    assert_equal_without_padding("masked_lm")


def assert_equal_without_padding(task: str) -> None:
    """Train a task in microbatches of tokens without padding, and compare it with padded rows."""
    tokens = {"micro_batch_size": None, "micro_batch_tokens": 120}
    assert_same_training(train_task(task, {**FLAT, "training": tokens}), reference_of_task(task))


def test_without_keyed_dropout():
    keys = {"model": {"dropout": 0.0}, "training": {"layout_invariant_dropout": False}}
    assert_same_curve(train_tiny(tiny_recipe(**keys, **FLAT), num_steps=3), reference("fp32", 0.0).curve)


def split_of(lengths: list[int]) -> EncodedSplit:
    random = np.random.default_rng(0)
    return EncodedSplit(
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        tokens={"input_ids": random.integers(NUM_SPECIAL, VOCABULARY, sum(lengths))},
        scalars={"labels": random.integers(0, NUM_CLASSES, len(lengths))},
        content_hash="lengths",
    )


@pytest.mark.parametrize(
    "lengths", [[1] * 7, [9] * 7, [1, 17, 1, 2, 30, 1, 5]], ids=["of one token", "of equal lengths", "uneven"]
)
def test_seven_rows(monkeypatch: pytest.MonkeyPatch, lengths: list[int]):
    tiny = replace(TINY_TASKS["sequence_classification"], split=lambda _: split_of(lengths))
    monkeypatch.setitem(TINY_TASKS, "sequence_classification", tiny)
    tokens = {"micro_batch_size": None, "micro_batch_tokens": 31}
    padded, *others = (
        train_tiny(tiny_recipe(model={"dropout": 0.1}, **keys), num_steps=2)
        for keys in ({}, FLAT, {**FLAT, "training": tokens}, {"training": tokens})
    )
    for other in others:
        assert_same_curve(other, padded)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_layers_process_tokens_only(checkpointing: str):
    """Also counts the microbatches of `training.micro_batch_tokens`."""
    shapes: list[tuple[int, ...]] = []
    keys = {**FLAT, **BY_TOKENS, "activation_checkpointing": checkpointing}
    with tiny_training(tiny_recipe(**keys)) as training:
        for layer in layers_of(training.model).values():
            layer.output.dense.register_forward_hook(lambda _, args, output: shapes.append(tuple(output.shape)))
        batch = next(iter(training.loader))
        training.engine.train_step(batch)
    assert {shape[0] for shape in shapes} == {1}
    passes = 4 if checkpointing == "full" else 2  # two layers
    assert sum(shape[1] for shape in shapes) == passes * batch.num_tokens
    assert max(shape[1] for shape in shapes) <= 90


@pytest.mark.parametrize(
    "context", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.nightly)]
)
def test_the_ragged_last_batch_leaves_a_rank_without_rows(ranks: RankPools, context: int):
    """Use 13 rows in batches of 12: the second step has one row, and two of three ranks have only a filler."""
    keys = {"model": {"dropout": 0.1}}
    expected = train_tiny(tiny_recipe(**keys), num_rows=13, num_steps=4)
    recipe = tiny_recipe(**keys, **FLAT, **BY_TOKENS, parallel={"strategy": "fsdp", "context": context})
    for curve in ranks(3 * context).run(train_tiny, recipe, num_rows=13, num_steps=4):
        assert_same_curve(curve, expected)
