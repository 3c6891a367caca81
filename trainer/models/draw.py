"""Layout-invariant random weights: each module draws from its own stream.

With one generator for the whole model, a weight would depend on all earlier draws. These differ if a rank holds only
some of the modules.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from trainer.parallel.random import seed_generator, stream_key

_CPU = torch.device("cpu")


def draw_weights(
    model: nn.Module,
    names: Collection[str],
    seed: int,
    drawing: Callable[[Sequence[nn.Parameter]], AbstractContextManager[Any]] = nullcontext,
    held: Callable[[str], bool] = lambda _: True,
) -> None:
    """Draw the parameters `names` of a transformers model on the CPU again, by the model's own rules.

    Args:
        drawing: opens the context in which some parameters are drawn, which may give them memory for that time.
        held: a predicate for the parameters that this rank has. All parameters of one stream are drawn, or none,
            because a skipped parameter would change the numbers of the next one.
    """
    wanted = set(names)

    def draw(module: nn.Module, path: str, owner: Any) -> None:
        """Draw a module together with its leaf children, because its rule may set their parameters."""
        owner = module if isinstance(module, PreTrainedModel) else owner  # the model that has the rules
        # A rule of transformers for a module may set parameters of its children, so they are drawn as one stream.
        together: dict[str, nn.Module] = {}
        for name, child in module.named_children():
            if any(True for _ in child.children()):
                draw(child, f"{path}{name}.", owner)
            else:
                together[f"{path}{name}."] = child
        together[path] = module  # last, as in transformers: its rule overrides theirs
        drawn = {
            f"{at}{name}": parameter
            for at, part in together.items()
            for name, parameter in part.named_parameters(recurse=False)
            if f"{at}{name}" in wanted
        }
        # Nothing of this stream is on this rank. Its numbers need not be drawn: every module has a stream of its own.
        if not any(map(held, drawn)):
            return
        unset = {id(parameter) for parameter in drawn.values()}
        # Parameters with loaded values keep them.
        for parameter in module.parameters():  # transformers skips parameters with this mark
            parameter._is_hf_initialized = id(parameter) not in unset  # type: ignore[attr-defined]
        with drawing(list(drawn.values())):
            for at, part in together.items():
                seed_generator(_CPU, stream_key(seed, "weights", at))
                owner._init_weights(part)

    # The rules of transformers draw from torch's global generator, whose state is given back afterwards.
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        draw(model, "", model)
