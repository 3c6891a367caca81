"""The optimizer and its learning rate, functions of recipe and step alone."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trainer.recipe.schema import SGD, AdamW, Schedule

NormTypes = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase, nn.RMSNorm)


def no_decay_names(model: nn.Module) -> set[str]:
    """Return the parameters without weight decay: biases, and weights of normalisation layers.

    Classes of transformers with names that end in "Norm" count as normalisation layers.
    """
    names = set()
    for module_name, module in model.named_modules():
        is_norm = isinstance(module, NormTypes) or type(module).__name__.endswith("Norm")
        for name, _ in module.named_parameters(recurse=False):
            if is_norm or name == "bias" or name.endswith("_bias"):
                names.add(f"{module_name}.{name}" if module_name else name)
    return names


def build_optimizer(
    recipe: AdamW | SGD, parameters: Iterable[tuple[str, nn.Parameter]], no_decay: set[str]
) -> torch.optim.Optimizer:
    """Return the recipe's optimizer with two groups: with and without weight decay.

    On CPU and CUDA, fused kernels update all parameters in one pass over memory.
    """
    trainable = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [p for n, p in trainable if n not in no_decay], "weight_decay": recipe.weight_decay},
        {"params": [p for n, p in trainable if n in no_decay], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    fused = all(parameter.device.type in ("cpu", "cuda") for _, parameter in trainable)
    if isinstance(recipe, AdamW):
        first, second = recipe.betas
        return torch.optim.AdamW(
            groups, lr=recipe.learning_rate, betas=(first, second), eps=recipe.epsilon, fused=fused or None
        )
    fused = fused and not any(isinstance(p, DTensor) for _, p in trainable)  # torch fuses DTensors for Adam only
    return torch.optim.SGD(groups, lr=recipe.learning_rate, momentum=recipe.momentum, fused=fused or None)


def learning_rate_factor(recipe: Schedule, step: int, total_steps: int) -> float:
    """Return the factor of the learning rate in the step after `step` steps.

    Over W warm-up steps it is 1/(W+1), 2/(W+1), ...; the next step has 1. Linear and cosine schedules would reach 0 one
    step after the last, so no step has a rate of 0.
    """
    warmup = recipe.warmup if isinstance(recipe.warmup, int) else round(recipe.warmup * total_steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if recipe.name == "constant":
        return 1.0
    done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    return 1.0 - done if recipe.name == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))


def learning_rate(optimizer: AdamW | SGD, schedule: Schedule, step: int, total_steps: int) -> float:
    """Return the learning rate of the step after `step` steps."""
    return optimizer.learning_rate * learning_rate_factor(schedule, step, total_steps)
