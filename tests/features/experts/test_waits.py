"""Waits of the host for the counts of rows, in real steps and in those that a plan simulates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from tests.benchmarks.operations import cases, ours
from tests.features.experts.router_cases import recipe_of
from tests.helpers.ranks import RankPools
from tests.helpers.training import tiny_training

READS = ("cpu", "item", "nonzero", "numpy", "tolist", "__bool__", "__float__", "__index__", "__int__")
LAYERS, MICROBATCHES = 2, 3


@contextmanager
def reads_of_tensors() -> Iterator[list[str]]:
    """Note the methods that return values of a tensor to the host; of calls inside of each other, the outer one."""
    found: list[str] = []
    copies: list[Tensor] = []  # to read them is no further wait
    depth = [0]

    def noted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not depth[0] and not any(tensor is copy for copy in copies):
                found.append(name)
            depth[0] += 1
            try:
                result = method(tensor, *args, **kwargs)
            finally:
                depth[0] -= 1
            if name == "cpu":
                copies.append(result)
            return result

        return read

    with ExitStack() as stack:
        for name in READS:
            stack.enter_context(mock.patch.object(Tensor, name, noted(name, getattr(Tensor, name))))
        yield found


def reads_of_step(kind: str, sections: dict[str, Any]) -> list[str]:
    """Return the reads of the second step; the first one allocates."""
    training = {"global_batch_size": 12, "micro_batch_size": 12 // MICROBATCHES} | sections.pop("training", {})
    with tiny_training(recipe_of(kind, {}, training=training, **sections)) as one:
        first, second = [batch for batch, _ in zip(one.loader, range(2), strict=False)]
        one.engine.train_step(first)
        with reads_of_tensors() as found:
            one.engine.train_step(second)
        return found


RECOMPUTED = {"activation_checkpointing": "full"}
# Of host tensors: two sizes of each microbatch and three of the step; and once the results.
READS_OF_HOST = {"__int__": 2 * MICROBATCHES, "__float__": 3, "tolist": 1}


@pytest.mark.parametrize("is_divided", [False, True])
def test_the_host_waits_once_in_each_layer_and_microbatch(ranks: RankPools, is_divided: bool):
    """Not again in a recomputation; one process waits as expert ranks do, because CPUs have no grouped product."""
    divided = {"parallel": {"strategy": "ddp", "expert": 2}, "training": {"micro_batch_size": 2}}
    sections: dict[str, Any] = {**RECOMPUTED, **(divided if is_divided else {})}
    for reads in ranks(1 + is_divided).run(reads_of_step, "mixtral", sections):
        assert Counter(reads) == {"cpu": LAYERS * MICROBATCHES, **READS_OF_HOST}


@pytest.mark.parametrize(
    ("layout", "keys", "waits"),
    [
        ("one process", {}, 0),
        ("expert 2", RECOMPUTED, LAYERS),
        pytest.param("one process", RECOMPUTED, 0, marks=pytest.mark.nightly),
        *(pytest.param(layout, {}, 0, marks=pytest.mark.nightly) for layout in ("ddp", "fsdp")),
    ],
)
def test_a_gpu_waits_for_counts_of_other_ranks_only(layout: str, keys: dict[str, Any], waits: int):
    (case,) = [one for one in cases() if (one.model, one.layout) == ("Qwen3-MoE tiny", layout)]
    assert ours(replace(case, keys=keys)).waits == waits
