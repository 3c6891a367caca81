"""What the table of placements says, from which the rest derives."""

from __future__ import annotations

import torch
from torch import nn

from trainer.parallel.placement import ParameterPlacement, Split, whole

SIZES = {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "tp": 4}


def test_whole_parameters_lie_whole_and_their_gradients_are_partial_over_the_data_ranks():
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    model[1].bias.requires_grad_(False)
    placements = whole(model)
    assert list(placements) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    weight = placements["0.weight"]
    assert (weight.shape, weight.splits, weight.split_axes, weight.partial_over) == ((2, 3), (), (), ("dp",))
    assert [placement.trainable for placement in placements.values()] == [True, True, True, False]


def test_a_tied_parameter_stands_once():
    model = nn.ModuleDict({"embedding": nn.Embedding(5, 2), "head": nn.Linear(2, 5, bias=False)})
    model["head"].weight = model["embedding"].weight
    assert list(whole(model)) == ["embedding.weight"]


def test_elements_of_one_rank():
    assert ParameterPlacement("p", (8, 6)).num_elements(SIZES) == 48
    assert ParameterPlacement("p", (8, 6), (Split(0, "tp"),)).num_elements(SIZES) == 12
    twice = ParameterPlacement("p", (8, 6), (Split(0, "tp"), Split(0, "dp_shard")))
    assert twice.num_elements(SIZES) == 6
    assert twice.split_axes == ("tp", "dp_shard")


def test_a_scalar_has_one_element():
    assert whole(nn.ParameterDict({"s": nn.Parameter(torch.tensor(1.0))}))["s"].num_elements(SIZES) == 1
