"""Updates of StableAdamW beside a plain loop of algorithm 2 of Wortsman et al. 2023 (arXiv:2304.13013)."""

from __future__ import annotations

import torch

from trainer.engine.optimizers.parameters import TrainedParameters
from trainer.engine.optimizers.table import build_optimizer
from trainer.features.stable_adamw.section import StableAdamW

RATE, BETAS, EPSILON, DECAY = 0.01, (0.8, 0.95), 1e-3, 0.1


def test_updates_are_those_of_the_paper():
    draws = torch.Generator().manual_seed(0)
    shapes = {"one.weight": (4, 6), "two.weight": (4, 6), "bias": (5,)}
    named = {name: torch.nn.Parameter(torch.randn(shape, generator=draws)) for name, shape in shapes.items()}
    theta = {name: parameter.detach().double() for name, parameter in named.items()}
    first, second = ({name: torch.zeros_like(value) for name, value in theta.items()} for _ in range(2))
    section = StableAdamW(
        name="stable_adamw", learning_rate=RATE, betas=list(BETAS), epsilon=EPSILON, weight_decay=DECAY
    )
    optimizer = build_optimizer(section, TrainedParameters(named, {"bias"}))
    clipped = 0
    for step in range(1, 7):
        scale = 30.0 if step == 4 else 1.0  # one large gradient, which must be clipped
        for name, parameter in named.items():
            parameter.grad = torch.randn(parameter.shape, generator=draws) * scale
            gradient = parameter.grad.double()
            one, two = (beta * (1 - beta ** (step - 1)) / (1 - beta**step) for beta in BETAS)
            first[name] = one * first[name] + (1 - one) * gradient
            second[name] = two * second[name] + (1 - two) * gradient**2
            rms = (gradient**2 / second[name].clamp(min=EPSILON**2)).mean().sqrt().item()
            clipped += rms > 1.05
            rate = RATE / max(1.0, rms)
            decay = 0.0 if name == "bias" else DECAY
            theta[name] = theta[name] * (1 - rate * decay) - rate * first[name] / (second[name].sqrt() + EPSILON)
        optimizer.begin(RATE, step - 1)
        optimizer.step()
    assert 3 <= clipped < 18
    for name, parameter in named.items():
        torch.testing.assert_close(parameter.detach().double(), theta[name], atol=1e-6, rtol=1e-5)


def test_without_a_clip_it_is_adamw():
    """Moments of constant gradients equal them, so no update is larger than 1."""
    weights = [torch.nn.Parameter(torch.ones(3, 3)) for _ in range(2)]
    stable = build_optimizer(
        StableAdamW(name="stable_adamw", learning_rate=RATE, weight_decay=DECAY), TrainedParameters({"w": weights[0]})
    )
    plain = torch.optim.AdamW([weights[1]], lr=RATE, weight_decay=DECAY)
    for _ in range(4):
        for weight in weights:
            weight.grad = torch.full((3, 3), 0.5)
        stable.step()
        plain.step()
    torch.testing.assert_close(*weights)
