"""Embeddings of all kinds resume in another layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.ranks import RankPools
from tests.helpers.training import TINY_TASKS, tiny_recipe
from tests.parity.cases import assert_same_curve
from tests.parity.test_resuming import all_steps, first_steps, last_steps, tail


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "keys", "saving", "going_on"),
    [
        # The regulariser grows over all steps, so the step must go on too.
        ("sparse_embedding", {"flops_warmup": 9}, {"strategy": "fsdp"}, {"tensor": 2}),
        ("multi_vector_embedding", {}, {"strategy": "zero3"}, {"context": 2}),
    ],
)
def test_other_vectors_go_on_in_another_layout(ranks: RankPools, tmp_path: Path, task, keys, saving, going_on):
    tiny = TINY_TASKS[task]
    one, first, last = (
        tiny_recipe(task={**tiny.keys, **keys}, model=tiny.model, parallel=parallel)
        for parallel in ({}, saving, going_on)
    )
    ranks(2).run(first_steps, first, tmp_path)
    for curve in ranks(2).run(last_steps, last, tmp_path):
        assert_same_curve(curve, tail(all_steps(one)))


@pytest.mark.parametrize(
    ("saving", "going_on"),
    [({"strategy": "fsdp"}, {"tensor": 2}), pytest.param({"strategy": "zero3"}, {}, marks=pytest.mark.nightly)],
)
@pytest.mark.slow
def test_dense_layers_and_a_temperature_go_on_in_another_layout(ranks: RankPools, tmp_path: Path, saving, going_on):
    tiny = TINY_TASKS["embedding_duplicates"]
    one, first, last = (
        tiny_recipe(task=tiny.keys, model=tiny.model, parallel=parallel) for parallel in ({}, saving, going_on)
    )
    ranks(2).run(first_steps, first, tmp_path)
    (state,) = (tmp_path / "checkpoints").glob("step-*/state.json")
    names = json.loads(state.read_text())["tensors"]
    assert sum("dense" in name.lower() or "scale" in name for name in names) >= 3
    for curve in ranks(2).run(last_steps, last, tmp_path):
        assert_same_curve(curve, tail(all_steps(one)))
