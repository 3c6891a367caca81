"""Experts of several ranks against transformers' function on all tokens, and against a plain loop of messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.features.experts.test_products import experts_of
from tests.features.experts.tiny_experts import build_experts
from tests.helpers.ranks import RankPools
from trainer.features.experts.axis import divide_experts
from trainer.features.experts.exchange import exchanged_counts, to_rank
from trainer.features.experts.products import EXPERT_PRODUCTS, sorted_by_expert, use_products
from trainer.parallel.placement import whole

NUM_EXPERTS, WIDTH = 12, 32
KEYS = {"num_local_experts": NUM_EXPERTS}


def tokens_of(size: int, kind: str) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return the hidden states, the chosen experts and their weights on each rank."""
    random = torch.Generator().manual_seed(3)
    found = []
    for rank in range(size):
        count = 0 if kind == "a rank without tokens" and rank == size - 1 else 3 + 2 * rank
        # The last experts are on the last rank.
        most = {"one has all": 1, "most have none": 2}.get(kind, NUM_EXPERTS)
        first = torch.randint(most, (count, 1), generator=random)
        index = first if most == 1 else torch.cat([first, (first + 1) % most], -1)
        hidden = torch.randn(count, WIDTH, generator=random, dtype=torch.float64)
        found.append((hidden, index, torch.rand(index.shape, generator=random, dtype=torch.float64)))
    return found


def outcome(model: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> list[Tensor]:
    """Return the output, the gradients of hidden states and weights, and those of the experts on this rank."""
    experts = experts_of(model)
    inputs = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
    output = experts(inputs[0], index, inputs[1])
    output.square().sum().backward()
    return [output.detach(), *(tensor.grad for tensor in (*inputs, *experts.parameters()))]


def of_rank(kind: str, model_type: str) -> list[Tensor]:
    model = build_experts(model_type, **KEYS).double()
    use_products(model)
    divide_experts(model, dist.group.WORLD, whole(model))
    return outcome(model, *tokens_of(dist.get_world_size(), kind)[dist.get_rank()])


@pytest.mark.parametrize(
    ("size", "kind", "model_type"),
    [
        (2, "a rank without tokens", "mixtral"),
        (3, "one has all", "mixtral"),
        pytest.param(3, "most have none", "gpt_oss", marks=pytest.mark.slow),
        pytest.param(4, "a rank without tokens", "gpt_oss", marks=pytest.mark.slow),
        pytest.param(4, "random", "mixtral", marks=pytest.mark.nightly),
    ],
)
def test_outputs_and_gradients_are_those_of_all_tokens(ranks: RankPools, size: int, kind: str, model_type: str):
    model = build_experts(model_type, **KEYS).double()
    model.config._experts_implementation = "eager"
    parts = tokens_of(size, kind)
    expected = outcome(model, *(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
    found = ranks(size).run(of_rank, kind, model_type)
    for number, whole_tensor in enumerate(expected):
        # Tokens and experts lie over the ranks in order.
        torch.testing.assert_close(
            torch.cat([tensors[number] for tensors in found]), whole_tensor, rtol=1e-9, atol=1e-12
        )


def messages(kind: str) -> tuple[list[Tensor], list[Tensor]]:
    """Send rows to the ranks with their experts by the exchange, and one by one; return both, with gradients."""
    rank, size = dist.get_rank(), dist.get_world_size()
    hidden, index, _ = tokens_of(size, kind)[rank]
    order, counts = sorted_by_expert(index, NUM_EXPERTS)
    rows = hidden[order // index.shape[1]].requires_grad_()
    of_ranks, sent, received = exchanged_counts(counts, len(rows), dist.group.WORLD)
    assert torch.tensor(received).equal(of_ranks)
    sizes = [sum(row) for row in sent], [sum(row) for row in received]
    arrived = to_rank(rows, *sizes, dist.group.WORLD)
    back = to_rank(arrived * (rank + 1), sizes[1], sizes[0], dist.group.WORLD)
    back.sum().backward()

    plain = []
    for source in range(size):  # every rank tells all rows of one rank, and each takes its own
        of_source, index_of_source, _ = tokens_of(size, kind)[source]
        chosen = sorted((expert, place) for place, expert in enumerate(index_of_source.flatten().tolist()))
        own = [
            of_source[place // index_of_source.shape[1]]
            for expert, place in chosen
            if expert * size // NUM_EXPERTS == rank
        ]
        plain += own
    owners = index.flatten()[order] * size // NUM_EXPERTS
    factors = (owners + 1).double()[:, None].expand_as(rows)
    assert rows.grad is not None
    return [arrived.detach(), back.detach(), rows.grad], [
        torch.stack(plain) if plain else arrived.detach().new_empty(0, WIDTH), rows.detach() * factors, factors
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["random", "one has all"])
def test_rows_travel_and_return_as_in_a_plain_loop(ranks: RankPools, kind: str):
    for found, expected in ranks(3).run(messages, kind):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_the_function_is_chosen():
    model = build_experts("mixtral")
    use_products(model)
    assert model.config._experts_implementation == EXPERT_PRODUCTS
