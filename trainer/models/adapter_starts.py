"""The tensors of an adapter that begin as a function of the weight below it; PEFT computes the factors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from trainer.base.distribution import install_command
from trainer.base.errors import UsageError
from trainer.parallel.random import stream_key
from trainer.parallel.tensor.kinds import ATTRIBUTE
from trainer.recipe.schema import Adapter

Start = Callable[[Tensor, Tensor], Mapping[str, Tensor]]
"""Returns parameters of an adapter by name, from the whole weight of its layer, and from the one that it computes with.

They differ in a quantised layer. Both are as the layer stores them.
"""


def require_package(adapter: Adapter) -> None:
    """Refuse a start that needs a package which is not installed."""
    if adapter.start is not None and find_spec("peft") is None:
        raise UsageError(
            f"`model.adapter.start` is {adapter.start}, which needs the package `peft`; install it"
            f" ({install_command('lora')}) or set it to null"
        )


def rows_start(name: str, ids: Sequence[int]) -> Start:
    """Return the start of trained rows `name`: those of the weight."""
    return lambda weight, _: {name: weight[list(ids)]}


def joined_starts(first: Start, second: Start) -> Start:
    """Return the start of two parts of an adapter over one weight, such as a product and trained rows."""
    return lambda stored, used: {**first(stored, used), **second(stored, used)}


def product_start(layer: str, adapter: Adapter, seed: int, transposed: bool) -> Start | None:
    """Return the start of the product of a layer; None if it does not depend on the weight.

    Args:
        transposed: whether the weight is `[in, out]`.
    """
    if adapter.start is None and adapter.type == "lora":
        return None

    def start(stored: Tensor, used: Tensor) -> Mapping[str, Tensor]:
        # From here on matrices are `[out, in]`, as PEFT has them; `Conv1D` stores `[in, out]`.
        weight, base = (stored.t(), used.t()) if transposed else (stored, used)
        values: dict[str, Tensor] = {}
        # LoftQ fits the factors to the error of the quantisation; a layer that is not quantised has none.
        if adapter.start == "loftq" and used is not stored:
            first, second = _principal(weight - base, layer, adapter, stream_key(seed, "start", layer))
            values |= {"A": first, "B": second}
            base = base + adapter.scaling_of(layer) * second @ first
        elif adapter.start in ("pissa", "pissa_niter_16"):
            first, second = _principal(weight, layer, adapter, stream_key(seed, "start", layer))
            # PiSSA trains the factors and keeps their first values. The base weight stays, because the product of the
            # first values is subtracted.
            values |= {"A": first, "B": second, "start_A": first.clone(), "start_B": second.clone()}
        if adapter.type == "dora":
            # DoRA's magnitudes are the norms of the rows of the weight, with the product as it begins.
            values["magnitude.weight"] = torch.linalg.vector_norm(base, dim=1)
        return {f"{layer}.{ATTRIBUTE}.{name}": tensor for name, tensor in values.items()}

    return start


def _principal(weight: Tensor, layer: str, adapter: Adapter, key: int) -> tuple[Tensor, Tensor]:
    """Return the factors of the part of a matrix `[out, in]` with the largest singular values; the scaling is in them.

    Singular vectors have no sign of their own, so another machine may find the opposite ones. The largest element of
    each row of `A` is made positive.
    """
    # A plan needs shapes only.
    if weight.is_meta:
        rank = adapter.rank_of(layer)
        return weight.new_empty(rank, weight.shape[1]), weight.new_empty(weight.shape[0], rank)
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # PEFT imports it; it warns of a kernel
    from peft import LoraConfig
    from peft.tuners.lora import Linear

    # LoftQ takes the largest singular vectors of the quantisation error, as PiSSA does of the weight.
    kind = "pissa" if adapter.start == "loftq" else adapter.start
    rank, alpha = adapter.rank_of(layer), adapter.alpha_of(layer)
    # On `meta`, so that no random weight is drawn only to be replaced.
    base = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    base.weight = nn.Parameter(weight, requires_grad=False)
    # The approximate decomposition draws random numbers; the seed makes them a function of the layer's name.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key)
        config = LoraConfig(r=rank, lora_alpha=alpha, use_rslora=adapter.rank_stabilised, init_lora_weights=kind)
        linear = Linear(base, "default", config=config, r=rank, lora_alpha=alpha)
    first, second = (part["default"].weight.detach() for part in (linear.lora_A, linear.lora_B))
    largest = first.gather(1, first.abs().argmax(dim=1, keepdim=True))
    signs = torch.where(largest < 0, -1.0, 1.0)
    return first * signs, second * signs.t()
