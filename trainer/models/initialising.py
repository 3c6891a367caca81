"""Random weights that do not depend on the layout: each module draws from a stream of its own.

One generator for the whole model would make a weight depend on what was drawn before it, which differs where a rank
holds only some of the modules, or where DeepSpeed partitions them while they are made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from trainer.parallel.random import stream_key

Gather = Callable[[Sequence[nn.Parameter]], AbstractContextManager[Any]]
"""A context in which partitioned parameters are whole, and after which they are cut again as they were left."""


def whole_already(parameters: Sequence[nn.Parameter]) -> AbstractContextManager[Any]:
    """The `Gather` of a model that is not partitioned."""
    return nullcontext()


def draw_weights(
    model: nn.Module, names: Collection[str], seed: int, gather: Gather, held: Callable[[str], bool] = lambda _: True
) -> None:
    """Draws the parameters `names` of a transformers model again, by the model's own rules.

    Args:
        model: of transformers.
        names: as in `model.named_parameters()`.
        seed: the recipe's.
        gather: makes parameters whole.
        held: whether this rank has a parameter. What is drawn from one stream is drawn whole or not at all, since a
            rule that leaves one parameter out would give the next one other numbers.
    """
    wanted = set(names)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        _draw(model, "", model, wanted, seed, gather, held)


def _draw(
    module: nn.Module,
    path: str,
    owner: nn.Module,
    wanted: set[str],
    seed: int,
    gather: Gather,
    held: Callable[[str], bool],
) -> None:
    """Draws a module together with those of its children that have none: its rule may be about their parameters."""
    owner = module if isinstance(module, PreTrainedModel) else owner  # whose rules these are
    together: dict[str, nn.Module] = {}
    for name, child in module.named_children():
        if any(True for _ in child.children()):
            _draw(child, f"{path}{name}.", owner, wanted, seed, gather, held)
        else:
            together[f"{path}{name}."] = child
    together[path] = module  # last, as in transformers: its rule stands above theirs
    found = {
        f"{at}{name}": parameter
        for at, part in together.items()
        for name, parameter in part.named_parameters(recurse=False)
        if f"{at}{name}" in wanted
    }
    if not any(held(name) for name in found):
        return
    drawn = list(found.values())
    unset = {id(parameter) for parameter in drawn}
    for parameter in module.parameters():  # transformers leaves alone what carries this mark
        parameter._is_hf_initialized = id(parameter) not in unset  # type: ignore[attr-defined]
    with gather(drawn):
        for at, part in together.items():
            torch.manual_seed(stream_key(seed, "weights", at))
            owner._init_weights(part)  # type: ignore[operator]
