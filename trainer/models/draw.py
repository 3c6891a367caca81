"""Layout-invariant random weights: each module draws from its own stream.

With one generator for the whole model, a weight would depend on all earlier draws. These differ if a rank holds only
some of the modules, or if DeepSpeed partitions them during construction.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from trainer.parallel.random import seed_generator, stream_key

_CPU = torch.device("cpu")
Gather = Callable[[Sequence[nn.Parameter]], AbstractContextManager[Any]]
"""A context that makes partitioned parameters whole, and partitions them again with their new values on exit."""


def whole_already(parameters: Sequence[nn.Parameter]) -> AbstractContextManager[Any]:
    """Do nothing: the `Gather` of a model that is not partitioned."""
    return nullcontext()


@contextmanager
def _on_cpu(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Hold parameters on the CPU inside of this context: the generators of other devices draw other numbers."""
    elsewhere = [(one, one.data) for one in parameters if one.device.type not in ("cpu", "meta")]
    for parameter, data in elsewhere:
        parameter.data = data.cpu()
    yield
    for parameter, data in elsewhere:
        parameter.data = data.copy_(parameter.data)


def draw_weights(
    model: nn.Module, names: Collection[str], seed: int, gather: Gather, held: Callable[[str], bool] = lambda _: True
) -> None:
    """Draw the parameters `names` of a transformers model again, by the model's own rules.

    Args:
        held: a predicate for the parameters that this rank has. All parameters of one stream are drawn, or none,
            because a skipped parameter would change the numbers of the next one.
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
    """Draw a module together with its leaf children, because its rule may set their parameters."""
    owner = module if isinstance(module, PreTrainedModel) else owner  # the model that has the rules
    together: dict[str, nn.Module] = {}
    for name, child in module.named_children():
        if any(True for _ in child.children()):
            _draw(child, f"{path}{name}.", owner, wanted, seed, gather, held)
        else:
            together[f"{path}{name}."] = child
    together[path] = module  # last, as in transformers: its rule overrides theirs
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
    for parameter in module.parameters():  # transformers skips parameters with this mark
        parameter._is_hf_initialized = id(parameter) not in unset  # type: ignore[attr-defined]
    with gather(drawn), _on_cpu(drawn):
        for at, part in together.items():
            seed_generator(_CPU, stream_key(seed, "weights", at))
            owner._init_weights(part)  # type: ignore[operator]
