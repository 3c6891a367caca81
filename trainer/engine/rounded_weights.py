"""Casts of the operands of matrix products to 16 bits, and of their gradients to fp32.

Autocast rounds each weight in each forward pass, and returns each gradient to fp32 in each backward pass, by an
operation for each of them. A feature may cast them together, with the same numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import repeat
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trainer.base.extensions import sole
from trainer.engine.precision import COMPUTE_DTYPES
from trainer.parallel.microbatch import Microbatch
from trainer.recipe.schema import Recipe


class RoundedWeights(Protocol):
    """Copies of weights in 16 bits, with which their modules compute inside of the context `use`."""

    def use(self) -> AbstractContextManager[None]:
        """Let the modules compute with rounded weights inside of this context, in the passes of a step."""

    def refresh(self) -> None:
        """Round the weights again that changed since an optimizer wrote their copies."""

    def join(self) -> None:
        """Give one copy to weights of layers that shared an input in the first step; `use` ends with it."""

    def used_in(self, function: Callable[[Microbatch], Tensor]) -> Callable[[Microbatch], Tensor]:
        """Return a function that computes with rounded weights, for passes in a graph."""

    def leave(self, weights: Iterable[Tensor]) -> None:
        """Leave the gradients of weights in 16 bits, from the first pass on, if the graph that is learned has one each.

        Nobody may add to such a gradient.
        """

    def learn(self, loss: Tensor) -> None:
        """Learn, inside of `use`, which weights the graph of a loss uses once."""


class CurrentCopies:
    """Rounded weights around graphs: a graph cannot look whether a copy that an optimizer writes is current."""

    def __init__(self, rounded: RoundedWeights) -> None:
        self.learn, self.refresh, self.used_in = rounded.learn, rounded.refresh, rounded.used_in
        self.leave, self.join = rounded.leave, rounded.join

    @contextmanager
    def use(self) -> Iterator[None]:
        self.refresh()
        yield
        self.join()


class Casts(Protocol):
    """Casts that several products share, registered as `casts`."""

    def share_inputs(self, model: nn.Module) -> None:
        """Let the products of an input use one copy of it."""

    def weights(
        self,
        models: Iterable[nn.Module],
        dtype: torch.dtype,
        together: bool,
        place_of: Callable[[Tensor], Tensor | None],
    ) -> RoundedWeights:
        """Return the weights of models in 16 bits; for the other arguments see `rounded_weights`."""


def registered_casts() -> Casts | None:
    """Return the registered casts; None: autocast makes each by itself."""
    casts: type[Casts] | None = sole("casts")
    return None if casts is None else casts()


def nowhere(_: Tensor) -> None:
    """Return no place for a gradient."""


def rounded_weights(
    models: Iterable[nn.Module],
    recipe: Recipe,
    together: bool = True,
    place_of: Callable[[Tensor], Tensor | None] = nowhere,
) -> RoundedWeights | None:
    """Return the rounded weights of models; None if the recipe computes in fp32, or autocast rounds them.

    Args:
        models: the models, on their device. Embeddings and norms keep their weights, also if a product shares them.
        together: whether the layers of a model return their gradients to fp32 layer by layer; else, module by module.
        place_of: returns memory for the gradient of a weight in this pass; None: the pass allocates it.
    """
    dtype = COMPUTE_DTYPES.get(recipe.precision)
    if dtype is None or (casts := registered_casts()) is None:
        return None
    return casts.weights(models, dtype, together, place_of)


def in_fp32(tensors: Sequence[Tensor], places: Iterable[Tensor | None] | None = None) -> list[Tensor]:
    """Return tensors in fp32, cast by one operation; those in fp32 are returned themselves.

    Args:
        places: memory for the results that are cast; None: it is allocated.
    """
    exact = [
        t if t.dtype == torch.float32 else torch.empty_like(t, dtype=torch.float32) if place is None else place
        for t, place in zip(tensors, places or repeat(None, len(tensors)), strict=True)
    ]
    if rounded := [t for t in tensors if t.dtype != torch.float32]:
        # One cast for the whole list; the lists of new and of rounded tensors have the same order.
        torch._foreach_copy_([new for new, old in zip(exact, tensors, strict=True) if new is not old], rounded)
    return exact


def used_once(loss: Tensor) -> set[tuple[Any, int]]:
    """Return the outputs in the graph of a loss that one operation uses, each as its node and its number there."""
    # A walk with a list, because the graph of a deep model is deeper than Python's recursion limit.
    waiting: list[Any] = [loss.grad_fn]
    known, uses = set(waiting), Counter[tuple[Any, int]]()
    while waiting:
        # A node of None stands for an input that needs no gradient.
        edges = [(node, number) for node, number in waiting.pop().next_functions if node is not None]
        uses.update(edges)
        new = {node for node, _ in edges} - known
        known |= new
        waiting.extend(new)
    return {edge for edge, number in uses.items() if number == 1}


def learning(
    model: nn.Module, loss_sum: Callable[[Microbatch], Tensor], learn: Callable[[Tensor], object]
) -> Callable[[Microbatch], Tensor]:
    """Return `loss_sum`, which passes the loss of its first call to `learn`.

    A model that computes its feed-forward in chunks of positions uses weights more often for longer rows: nothing is
    learned of it.
    """
    has_chunks = any(getattr(module, "chunk_size_feed_forward", 0) for module in model.modules())
    waiting = [] if has_chunks else [learn]

    def run(microbatch: Microbatch) -> Tensor:
        loss = loss_sum(microbatch)
        while waiting:
            # The list is then empty, so only the first graph is walked.
            waiting.pop()(loss)
        return loss

    return run
