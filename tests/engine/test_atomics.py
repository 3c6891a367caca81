"""Operations that add in no fixed order on a GPU, counted in steps on fake tensors.

Source: the list of `torch.use_deterministic_algorithms`. The backward pass of an embedding is not in it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from tests.helpers.training import TINY_TASKS
from tests.tools.plan.measured import recipe_of
from trainer.parallel.flat_rows import FlatRows
from trainer.recipe.plan import plan_run
from trainer.tools.plan.simulated_step import plan_step

WITHOUT_ORDER = {
    "index_add", "index_add_", "index_copy", "index_copy_", "index_put", "index_put_", "_index_put_impl_", "put_",
    "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "cumsum", "histc", "bincount", "median",
    "nll_loss2d_forward", "nll_loss2d_backward", "_embedding_bag_backward",
    "_scaled_dot_product_efficient_attention_backward",
}  # fmt: skip
MICROBATCHES = 4


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, {}),
        # A row joined without padding goes to a place of its own, so that each sum has one term.
        ({"data": {"padding_free": True}}, {"index_add": MICROBATCHES, "index_copy": MICROBATCHES}),
        # The sum of the losses, which no gradient needs.
        (
            {"task": TINY_TASKS["question_answering"].keys},
            {"nll_loss2d_forward": MICROBATCHES, "nll_loss2d_backward": MICROBATCHES},
        ),
    ],
    ids=["rows", "packed", "answers"],
)
def test_a_step_uses_few_atomic_operations(keys: dict[str, Any], expected: dict[str, int]):
    step = plan_step(plan_run(recipe_of(keys), 1), 0, 24)
    found = Counter[str]()
    for kind, amount in step.totals.work.items():
        found[kind.name] += amount.number if kind.name in WITHOUT_ORDER else 0
    assert +found == expected


def test_joined_tokens_go_to_places_of_their_own():
    packed = FlatRows.of([3, 7, 1, 6, 7], 8, torch.device("cpu"))
    assert len(set(packed.places.tolist())) == 24
