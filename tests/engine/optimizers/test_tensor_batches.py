"""Batches of tensors: their limits, and the number of operations of an update."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, EPS, _zeropower_via_newtonschulz
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.training import tiny_recipe
from trainer.base.batches import batches
from trainer.engine.optimizers.parameters import TrainedParameters
from trainer.engine.optimizers.table import build_optimizer
from trainer.engine.optimizers.whole_access import WholeAccess
from trainer.features.adafactor.section import Adafactor
from trainer.features.muon.optimizer import orthogonalised
from trainer.features.muon.section import Muon
from trainer.parallel.placement import ParameterPlacement
from trainer.recipe.plan import plan_run
from trainer.recipe.schema import AdamW, OptimizerKeys
from trainer.training.process_group import open_mesh

RECIPES: dict[str, OptimizerKeys] = {
    "muon": Muon(name="muon", learning_rate=0.01, weight_decay=0.1),
    "adafactor": Adafactor(name="adafactor", learning_rate=0.01, weight_decay=0.1),
    "bf16_compensated": AdamW(),
    "bf16_stochastic": AdamW(),
}


def test_a_batch_has_consecutive_items_up_to_a_limit_and_a_larger_item_is_alone():
    assert list(batches([3, 4, 2, 9, 1, 7, 7], int, most=8)) == [[3, 4], [2], [9], [1, 7], [7]]
    assert list(batches([], int, most=8)) == []


@pytest.mark.parametrize("shape", [(4, 16, 16), (3, 16, 40), (3, 40, 16)])
def test_batched_iterations_equal_torch(shape: tuple[int, ...]):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = [_zeropower_via_newtonschulz(one.clone(), (DEFAULT_A, DEFAULT_B, DEFAULT_C), 5, EPS) for one in matrices]
    found = orthogonalised(matrices, 5)
    torch.testing.assert_close(found, torch.stack(expected), rtol=0, atol=2**-6)  # numbers near 1, in bf16


class _Counter(TorchDispatchMode):
    """A context that counts the operations with work on a device."""

    number = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += not function.is_view and "empty" not in function.name()
        return function(*args, **(kwargs or {}))


def num_operations(name: str, num_layers: int) -> int:
    """Return the operations of an update of equal layers, with the flag of a bad step on the device."""
    parameters = {}
    for layer in range(num_layers):
        for kind, shape in (("weight", (8, 12)), ("other", (8, 12)), ("bias", (8,))):
            parameter = nn.Parameter(torch.randn(shape))
            if "bf16" in name and kind != "bias":
                parameter = nn.Parameter(torch.randn(shape).bfloat16())
                parameter.grad_dtype = torch.float32
            parameter.grad = torch.randn(shape)
            parameters[f"{layer}.{kind}"] = parameter
    placements = {one: ParameterPlacement(label, tuple(one.shape)) for label, one in parameters.items()}
    mesh = open_mesh(plan_run(tiny_recipe(), 1).layout, torch.device("cpu"))
    recipe = tiny_recipe(precision="bf16", weights=name) if "bf16" in name else None
    matrices = {label for label in parameters if "bias" not in label}
    biases = parameters.keys() - matrices
    trained = TrainedParameters(parameters, biases, lambda: matrices, WholeAccess(placements, mesh), recipe=recipe)
    optimizer = build_optimizer(RECIPES[name], trained)
    optimizer.found_inf = torch.zeros(())
    optimizer.step()  # makes the state
    with _Counter() as counter:
        optimizer.step()
    return counter.number


@pytest.mark.parametrize("name", RECIPES)
def test_the_operations_of_an_update_do_not_grow_with_the_layers(name: str):
    assert num_operations(name, 16) == num_operations(name, 4)
