"""The optimizer and its learning rate, as functions of the recipe and of the step alone."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trainer.recipe.schema import SGD, AdamW, Schedule

NormTypes = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase, nn.RMSNorm)


def no_decay_names(model: nn.Module) -> set[str]:
    """Parameters that weight decay must leave alone: biases, and the weights of normalisation layers.

    Transformers' own normalisation layers are known by their class name, which ends in "Norm".
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
    """The recipe's optimizer in two groups, with and without weight decay.

    Fused kernels are used where torch has them for the device (CPU and CUDA), so that all parameters are updated in one
    pass over memory.
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
    fused = fused and not any(isinstance(p, DTensor) for _, p in trainable)  # which torch has for Adam only
    return torch.optim.SGD(groups, lr=recipe.learning_rate, momentum=recipe.momentum, fused=fused or None)


def learning_rate_factor(recipe: Schedule, step: int, total_steps: int) -> float:
    """What the learning rate is multiplied with in the step after `step` steps (0 for the first).

    Over W warm-up steps it grows as 1/(W+1), 2/(W+1), ..., is 1 in the step after them, and falls so that it would
    reach 0 one step after the last: no step is wasted on a rate of 0.
    """
    warmup = recipe.warmup if isinstance(recipe.warmup, int) else round(recipe.warmup * total_steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if recipe.name == "constant":
        return 1.0
    done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    return 1.0 - done if recipe.name == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))


def learning_rate(optimizer: AdamW | SGD, schedule: Schedule, step: int, total_steps: int) -> float:
    """The rate of the step after `step` steps; see `learning_rate_factor`."""
    return optimizer.learning_rate * learning_rate_factor(schedule, step, total_steps)
