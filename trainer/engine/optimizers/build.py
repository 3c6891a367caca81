"""The optimizer and its learning rate, functions of recipe and step alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd

from trainer.engine.optimizers.batches import stepped, takes_lists
from trainer.engine.optimizers.bf16_weights import IN_BF16, RoundedAdamW
from trainer.engine.optimizers.eight_bits import IN_BLOCKS, AdamW8bit, is_in_blocks
from trainer.engine.optimizers.schedule_free import schedule_free_adamw
from trainer.engine.optimizers.skipping import flag_of
from trainer.engine.optimizers.whole_matrices import Adafactor, Muon, WholeAccess
from trainer.parallel.kernels import kernel_support
from trainer.parallel.shards.gathering import local_part
from trainer.parallel.shards.stochastic_rounding import KeyedRounding
from trainer.recipe import schema
from trainer.recipe.schema import AdamW, OptimizerSection, Recipe, Schedule

_SGD_OPTIONS = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize", "foreach", "fused")
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


class SGD(torch.optim.SGD):
    """Torch's SGD, with two differences, so that its fused kernel can skip a bad step under every layout.

    - It steps the shards of DTensors, which torch does not fuse here.
    - Momentum begins as zeros, with the same result: torch's is undefined after a skipped first step.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters = stepped(group["params"])
            sgd(
                [local_part(parameter) for parameter in parameters],
                [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None],
                [self._momentum(parameter) if group["momentum"] else None for parameter in parameters],
                found_inf=flag_of(self),
                **{key: group[key] for key in _SGD_OPTIONS},
            )

    def _momentum(self, parameter: nn.Parameter) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        return local_part(state["momentum_buffer"])


def _divided(
    groups: Iterable[dict[str, Any]], key: str, has_key: Callable[[nn.Parameter], bool]
) -> list[dict[str, Any]]:
    """Return the groups, each divided into the parameters with `key`, which their group gets, and the others."""
    return [
        {**group, "params": found, **({key: True} if chosen else {})}
        for group in groups
        for chosen in (False, True)
        if (found := [parameter for parameter in group["params"] if has_key(parameter) == chosen])
    ]


def updates_in_batches(recipe: Recipe) -> bool:
    """Return whether the optimizer of a recipe updates `batches` of tensors, which have temporary copies."""
    kinds = schema.Muon | schema.Adafactor | schema.ScheduleFreeAdamW
    return isinstance(recipe.optimizer, kinds) or recipe.weights != "fp32"


def build_optimizer(
    recipe: OptimizerSection,
    parameters: Iterable[tuple[str, nn.Parameter]],
    no_decay: set[str],
    matrices: set[str] = frozenset(),  # type: ignore[assignment]
    whole: WholeAccess | None = None,
    rounding: KeyedRounding | None = None,
) -> torch.optim.Optimizer:
    """Return the recipe's optimizer with two groups: with and without weight decay.

    On CPU and CUDA, fused kernels update all parameters in one pass over memory.

    Args:
        recipe: the section of the recipe.
        parameters: the parameters, by name.
        no_decay: the names of those without weight decay.
        matrices: the names of those that Muon updates.
        whole: the access to whole tensors; None if no parameter is sharded.
        rounding: the stochastic rounding of weights in bf16; None: such weights have a compensation.
    """
    trainable = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for n, p in trainable if n not in no_decay], "weight_decay": recipe.weight_decay},
        {"params": [p for n, p in trainable if n in no_decay], "weight_decay": 0.0},
    ]
    if isinstance(recipe, schema.Muon):
        groups[0]["params"] = [p for n, p in trainable if n not in no_decay and n not in matrices]
        of_muon = {"momentum": recipe.momentum, "iterations": recipe.iterations, "weight_decay": recipe.weight_decay}
        groups.append({"params": [p for n, p in trainable if n in matrices], **of_muon})
    whole = whole or WholeAccess({})
    if isinstance(recipe, schema.AdamW8bit):
        groups = _divided(groups, IN_BLOCKS, lambda parameter: is_in_blocks(whole.placement(parameter).shape))
    groups = [group for group in groups if group["params"]]
    if isinstance(recipe, schema.Adafactor):
        return Adafactor(
            groups,
            whole,
            lr=recipe.learning_rate,
            beta2_decay=recipe.beta2_decay,
            d=recipe.clip_threshold,
            eps2=recipe.minimum_scale,
        )
    if isinstance(recipe, schema.ScheduleFreeAdamW):
        return schedule_free_adamw(
            groups,
            lr=recipe.learning_rate,
            betas=tuple(recipe.betas),
            eps=recipe.epsilon,
            foreach=all(takes_lists(parameter.device) for _, parameter in trainable),
        )
    fused = all(parameter.device.type in ("cpu", "cuda") for _, parameter in trainable)
    if isinstance(recipe, AdamW | schema.AdamW8bit | schema.Muon):
        first, second = recipe.betas
        options: dict[str, Any] = {
            "lr": recipe.learning_rate,
            "betas": (first, second),
            "eps": recipe.epsilon,
            "fused": fused or None,
        }
        if isinstance(recipe, schema.Muon):
            return Muon(groups, whole, **options)
        if isinstance(recipe, schema.AdamW8bit):
            return AdamW8bit(groups, whole, **options)
        if any(parameter.dtype == torch.bfloat16 for _, parameter in trainable):
            groups = _divided(groups, IN_BF16, lambda parameter: parameter.dtype == torch.bfloat16)
            return RoundedAdamW(groups, rounding, **options)
        return torch.optim.AdamW(groups, **options)
    return SGD(groups, lr=recipe.learning_rate, momentum=recipe.momentum, fused=fused or None)


def optimizer_notes(recipe: OptimizerSection, device: torch.device) -> list[str]:
    """Return a note on the kernel of moments in 8 bits on a GPU; there is none for other optimizers."""
    if device.type != "cuda" or not isinstance(recipe, schema.AdamW8bit):
        return []
    obstacle = kernel_support.obstacle(device)
    if obstacle is None:
        return ["moments in 8 bits are updated in a fused kernel"]
    return [f"moments in 8 bits are updated by operations of torch, because {obstacle}"]


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


def learning_rate(optimizer: OptimizerSection, schedule: Schedule, step: int, total_steps: int) -> float:
    """Return the learning rate of the step after `step` steps."""
    return optimizer.learning_rate * learning_rate_factor(schedule, step, total_steps)
