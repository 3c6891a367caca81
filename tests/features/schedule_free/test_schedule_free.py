"""Schedule-free AdamW: its update, and the exact switch between trained and averaged weights."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.ranks import RankPools
from tests.helpers.training import build_tiny, parallel_keys, tiny_recipe, tiny_training, weights_of
from trainer.base.errors import UsageError
from trainer.engine.optimizers.parameters import TrainedParameters
from trainer.engine.optimizers.table import build_optimizer
from trainer.features.schedule_free.section import ScheduleFreeAdamW
from trainer.models.parameter_rules import ParameterRule
from trainer.recipe.schema import Recipe

SECTIONS: dict[str, Any] = {
    "optimizer": {"name": "schedule_free_adamw", "learning_rate": 0.01},
    "schedule": {"name": "constant", "warmup": 3},
    "model": {"dropout": 0.1},
}


def test_update_and_average_are_the_published_rule():
    """Algorithm 1 of Defazio et al. 2024, with x, y and z apart, in fp64."""
    recipe = ScheduleFreeAdamW(
        name="schedule_free_adamw", learning_rate=0.1, weight_decay=0.1, betas=[0.8, 0.95], epsilon=1e-6
    )
    generator = torch.Generator().manual_seed(0)
    parameter = nn.Parameter(torch.randn(4, 3, generator=generator))
    optimizer = build_optimizer(recipe, TrainedParameters({"weight": parameter}))
    x = z = parameter.detach().double()
    second, weights = torch.zeros_like(x), 0.0
    for step, rate in enumerate((0.05, 0.1, 0.1, 0.1), start=1):
        y = 0.2 * z + 0.8 * x
        torch.testing.assert_close(parameter.detach().double(), y, atol=1e-6, rtol=1e-5)
        parameter.grad = torch.randn(4, 3, generator=generator)
        gradient = parameter.grad.double()
        second = 0.95 * second + 0.05 * gradient**2
        z = z - rate * gradient / ((second / (1 - 0.95**step)).sqrt() + 1e-6) - rate * 0.1 * y
        weights += rate**2
        x = x + rate**2 / weights * (z - x)
        optimizer.begin(rate, step - 1)
        optimizer.step()
        trained = parameter.detach().clone()
        optimizer.show()
        torch.testing.assert_close(parameter.detach().double(), x, atol=1e-6, rtol=1e-5)
        optimizer.hide()
        assert torch.equal(parameter, trained)


def test_a_group_with_a_rate_of_its_own_is_an_optimizer_with_that_rate():
    """Steps of the other group count, also while this one has no gradients."""

    def trained(rules: dict[str, ParameterRule], rate: float) -> nn.Parameter:
        weight = nn.Parameter(torch.linspace(-1, 1, 6))
        parameters = {"weight": weight, "bias": nn.Parameter(torch.ones(2))}
        recipe = ScheduleFreeAdamW(name="schedule_free_adamw", learning_rate=rate)
        optimizer = build_optimizer(recipe, TrainedParameters(parameters, {"bias"}, rules=rules))
        for step, factor in enumerate((0.5, 1.0, 1.0)):
            weight.grad = None if step == 0 else torch.linspace(1, 2, 6) * step
            parameters["bias"].grad = torch.ones(2)
            optimizer.begin(rate * factor, step, torch.zeros(()))
            optimizer.step()
        optimizer.show()
        return weight

    rules = {name: ParameterRule("", rate, 0.0) for name, rate in (("weight", 0.3), ("bias", 1.0))}
    assert torch.equal(trained(rules, 0.1), trained({}, 0.1 * 0.3))


def losses(recipe: Recipe, num_steps: int, evaluates: bool) -> tuple[list[float], list[float]]:
    """Return the losses of the steps, and those of the first microbatch of each batch in evaluations."""
    trained, shown = [], []
    with tiny_training(recipe) as training:
        for _, batch in zip(range(num_steps), training.loader, strict=False):
            trained.append(training.engine.train_step(batch).loss)
            if evaluates:
                shown.append(training.engine.eval_step(batch.microbatches[0]).loss_sum)
        shown.append(training.engine.eval_step(batch.microbatches[0]).loss_sum)
    return trained, shown


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("zero2", marks=pytest.mark.slow)])
def test_evaluations_change_no_training(ranks: RankPools, strategy: str):
    """Also where gathered weights stay on the ranks until the next backward pass."""
    stays = {"reshard_after_forward": False} if strategy == "fsdp" else {}
    recipe = tiny_recipe(**SECTIONS, parallel=parallel_keys(strategy, 2) | stays)
    for often, once in zip(ranks(2).run(losses, recipe, 6, True), ranks(2).run(losses, recipe, 6, False), strict=True):
        assert often[0] == once[0]
        assert often[1][-1] == once[1][-1]
        assert len(set(often[1][:-1])) == 6


def test_checkpoints_and_evaluations_have_the_averages():
    training = build_tiny(tiny_recipe(**SECTIONS))
    training.steps(4)
    parameters = {name: p.detach().clone() for name, p in training.model.named_parameters()}
    for name, average in weights_of(training.engine, training.mesh).items():
        state = training.engine.optimizer.state[training.model.get_parameter(name)]
        torch.testing.assert_close(0.1 * state["z"] + 0.9 * average, parameters[name])
        assert torch.equal(state["y"], parameters[name])
    assert any(not torch.equal(p, parameters[name]) for name, p in training.model.named_parameters()), (
        "the evaluated weights are the trained ones"
    )


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "schedulefree", None)
    recipe = ScheduleFreeAdamW(name="schedule_free_adamw", learning_rate=0.1)
    with pytest.raises(UsageError, match=r'pip install "recipe-trainer\[schedule-free\]"'):
        build_optimizer(recipe, TrainedParameters({"weight": nn.Parameter(torch.ones(2))}))
